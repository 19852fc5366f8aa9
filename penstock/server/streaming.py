"""The one way an answer leaves: as server-sent events while it is made, or whole.

Nothing is sent before the engine gave a first piece, so that a refusal still has its HTTP status; after that an error
is an event of its own and the stream ends without [DONE]. Knows nothing of the shape of any API: that is a `Reply`'s.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import aclosing

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.protocol.errors import reply_for
from penstock.protocol.frames import FRAMES_HEADER, NO_LEASE, ChoiceTokens, failure_frame, frame, last_frame
from penstock.protocol.generation import Usage
from penstock.protocol.prompt_note import PROMPT_HEADER, encode_note
from penstock.server.answer import Answer, Choice
from penstock.server.open_answers import ClientGone, OpenAnswers
from penstock.server.text_assembly import ScoredToken, TextPiece
from penstock.telemetry import RequestRecord

DONE = b"data: [DONE]\n\n"
CLIENT_GONE_STATUS = 499  # for logs and metrics only: nobody is there to read it

_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_PROMPT_HEADER = PROMPT_HEADER.encode()
_logger = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()


def event(message: msgspec.Struct) -> bytes:
    """Return one server-sent event."""
    return b"data: %b\n\n" % _encoder.encode(message)


class Reply(ABC):
    """How one API writes an answer."""

    @abstractmethod
    def events(self, choice: Choice, piece: TextPiece) -> bytes:
        """Return the events that tell of this piece."""

    @abstractmethod
    def usage_event(self, usage: Usage) -> bytes:
        """Return the last event's usage, or nothing where the caller did not ask for it."""

    @abstractmethod
    def whole(self, texts: list[tuple[Choice, TextPiece]], usage: Usage) -> bytes:
        """Return the body of a response that was not streamed; one merged piece for each choice."""


class AnswerResponse(Response):
    """Delivers an answer and writes its outcome into the request's record."""

    def __init__(
        self,
        answer: Answer,
        reply: Reply,
        *,
        stream: bool,
        record: RequestRecord,
        answers: OpenAnswers,
        framed: bool = False,
    ) -> None:
        super().__init__()
        self._answer = answer
        self._reply = reply
        self._stream = stream
        self._record = record
        self._answers = answers
        self._framed = framed  # for a gateway, which can then go on with it elsewhere
        self._started = False
        self._tells_prompt = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._tells_prompt = any(name == _PROMPT_HEADER for name, _ in scope["headers"])
        work = self._send_events(send) if self._stream else self._send_whole(send)
        try:
            await self._answers.attend(self._answer, work, receive)
        except ClientGone:
            self._record.finish = "abort"
            self._record.status = self._record.status or CLIENT_GONE_STATUS
        except PenstockError as error:
            await self._send_error(error, send)
        except Exception as error:
            _logger.exception("an answer could not be delivered (request %s)", self._record.request_id)
            await self._send_error(error, send)
        finally:
            self._note_outcome()
            self._answer.charge.close(self._record)

    async def _send_events(self, send: Send) -> None:
        last_events = b""
        async with aclosing(self._answer.batches()) as batches:
            async for batch in batches:
                events = b"".join([self._reply.events(choice, piece) for choice, piece in batch])
                # Before anything is awaited: choices go on while this is sent.
                framed = self._frame(events, batch) if self._framed else events
                if not self._started:
                    self._note_first_token()
                    await self._start(send, 200, self._event_headers())
                if framed is None:
                    last_events = events
                elif framed:
                    await send({"type": "http.response.body", "body": framed, "more_body": True})
        await self._book_outcome()
        end = last_events + self._reply.usage_event(self._answer.usage()) + DONE
        end = last_frame(end) if self._framed else end
        await send({"type": "http.response.body", "body": end, "more_body": False})

    def _frame(self, events: bytes, batch: list[tuple[Choice, TextPiece]]) -> bytes | None:
        """Return events in a frame; None for the last, which go with the end: an answer has finished or it has not."""
        if all(choice.finish is not None for choice in self._answer.choices):
            return None
        told = [ChoiceTokens(choice.index, choice.new_token_ids, piece.finish is not None) for choice, piece in batch]
        return frame(events, *told)

    def _event_headers(self) -> list[tuple[bytes, bytes]]:
        if not self._framed:
            return _EVENT_HEADERS
        return [*_EVENT_HEADERS, (FRAMES_HEADER.encode(), (self._answer.charge.ticket or NO_LEASE).encode())]

    async def _send_whole(self, send: Send) -> None:
        texts = await read_whole(self._answer, self._note_first_token)
        await self._book_outcome()
        await self._send_body(send, 200, self._reply.whole(texts, self._answer.usage()), [])

    async def _send_error(self, error: Exception, send: Send) -> None:
        reply = reply_for(error)
        self._record.error_code = reply.code
        if self._started and self._framed:
            self._note_outcome()
            self._answer.charge.leave(self._record)
        await self._book_outcome()
        if self._started:
            event_body = b"data: %b\n\n" % reply.body
            event_body = failure_frame(event_body, reply.code) if self._framed else event_body
            await send({"type": "http.response.body", "body": event_body, "more_body": False})
            return
        headers = [(name.encode(), value.encode()) for name, value in reply.headers.items()]
        await self._send_body(send, reply.status, reply.body, headers)

    async def _send_body(self, send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        length = str(len(body)).encode()
        fixed = [(b"content-type", b"application/json"), (b"content-length", length)]
        await self._start(send, status, fixed + headers)
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _start(self, send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._started = True
        own = [(name.encode(), value.encode()) for name, value in self._answer.charge.headers.items()]
        if self._tells_prompt and status == 200:
            own.append((_PROMPT_HEADER, encode_note(self._answer.prompt_note()).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers + own})

    async def _book_outcome(self) -> None:
        """Write what the call cost before its last byte leaves: what was answered is never lost."""
        self._note_outcome()
        await self._answer.charge.closed(self._record)

    def _note_first_token(self) -> None:
        if self._record.ttft_seconds is None:
            self._record.ttft_seconds = time.monotonic() - self._record.arrival

    def _note_outcome(self) -> None:
        note_outcome(self._record, self._answer)


async def read_whole(answer: Answer, on_piece: Callable[[], None] = lambda: None) -> list[tuple[Choice, TextPiece]]:
    """Return an answer to its end: one piece for each choice. Calls `on_piece` whenever something comes."""
    pieces: dict[int, list[TextPiece]] = {choice.index: [] for choice in answer.choices}
    async with aclosing(answer.batches()) as batches:
        async for batch in batches:
            on_piece()
            for choice, piece in batch:
                pieces[choice.index].append(piece)
    return [(choice, _merged(pieces[choice.index])) for choice in answer.choices]


def note_outcome(record: RequestRecord, answer: Answer) -> None:
    """Write into a request's record what its answer cost so far and how it ended."""
    usage = answer.usage()
    record.prompt_tokens = usage.prompt_tokens
    record.cached_tokens = usage.prompt_tokens_details.cached_tokens
    record.output_tokens = usage.completion_tokens
    reasons = {str(choice.finish) for choice in answer.choices if choice.finish is not None}
    record.finish = record.finish or ",".join(sorted(reasons))


def _merged(pieces: list[TextPiece]) -> TextPiece:
    tokens: list[ScoredToken] = [token for piece in pieces for token in piece.tokens]
    return TextPiece("".join(piece.text for piece in pieces), tokens, pieces[-1].finish)
