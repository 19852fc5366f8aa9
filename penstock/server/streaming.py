"""The one way an answer leaves: as server-sent events while it is made, or whole.

Nothing is sent before the engine gave a first piece, so that a refusal still has its HTTP status; after that an error
is an event of its own and the stream ends without [DONE]. Knows nothing of the shape of any API: that is a `Reply`'s.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.protocol.errors import reply_for
from penstock.protocol.frames import FRAMES_HEADER, NO_LEASE, ChoiceTokens, failure_frame, frame, last_frame
from penstock.protocol.generation import Usage
from penstock.protocol.prompt_note import PROMPT_HEADER, encode_note
from penstock.server.answer import Answer, Batch, Choice
from penstock.server.json_parts import Body
from penstock.server.loop_turns import ENTRIES_A_PASS, LoopTurns
from penstock.server.open_answers import ClientGone, OpenAnswers
from penstock.server.standstill import Standstill
from penstock.server.text_assembly import TextPiece
from penstock.telemetry import RequestRecord

DONE = b"data: [DONE]\n\n"
CLIENT_GONE_STATUS = 499  # for logs and metrics only: nobody is there to read it

_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_CHUNK_BYTES = 64 * 1024
_PROMPT_HEADER = PROMPT_HEADER.encode()
_logger = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()


def event(message: msgspec.Struct) -> bytes:
    """Return one server-sent event."""
    return event_around(_encoder.encode(message))


def event_around(message: bytes) -> bytes:
    return b"data: %b\n\n" % message


class Reply(ABC):
    """How one API writes an answer."""

    async def prepare(self, choice: Choice, turns: LoopTurns) -> None:  # noqa: B027 (most have nothing to prepare)
        """Make what `events` and `keep` will need for this choice and that takes long, in turns with others."""

    @abstractmethod
    def events(self, choice: Choice, piece: TextPiece) -> bytes:
        """Return the events that tell of this piece."""

    @abstractmethod
    def usage_event(self, usage: Usage) -> bytes:
        """Return the last event's usage, or nothing where the caller did not ask for it."""

    @abstractmethod
    def keep(self, choice: Choice, piece: TextPiece) -> None:
        """Take in a piece of an answer that is sent whole."""

    @abstractmethod
    def body(self, choices: Sequence[Choice], usage: Usage) -> Body:
        """Return the body of a response that was not streamed, once, made of all pieces that were kept."""


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
        standstill: Standstill,
        framed: bool = False,
    ) -> None:
        super().__init__()
        self._answer = answer
        self._reply = reply
        self._stream = stream
        self._record = record
        self._answers = answers
        self._standstill = standstill
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
            if self._standstill.is_recent():
                self._note_outcome()
                self._answer.charge.give_up(self._record, goes_on=self._started and self._framed)
            else:
                # A reader that stood still had the engine go on: it pays for what it left behind.
                self._answer.forsake()
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
                if not self._started:
                    self._note_first_token()
                    await self._start(send, 200, self._event_headers())
                async for events, told in self._written(batch):
                    is_end = told[-1] is batch[-1] and all(choice.finish is not None for choice in self._answer.choices)
                    if self._framed and is_end:
                        last_events = events  # they go with the end: an answer has finished or it has not
                    elif events:
                        framed = _frame(events, told) if self._framed else events
                        await send({"type": "http.response.body", "body": framed, "more_body": True})
        await self._book_outcome()
        end = last_events + self._reply.usage_event(self._answer.usage()) + DONE
        end = last_frame(end) if self._framed else end
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _written(self, batch: Batch) -> AsyncGenerator[tuple[bytes, Batch], None]:
        """Yield a batch's events and the pieces that they tell of. Echoes are many bytes: of those, some at a time."""
        events: list[bytes] = []
        told: Batch = []
        num_bytes = 0
        for told_now in batch:
            choice, piece = told_now
            if num_bytes > _CHUNK_BYTES:
                yield b"".join(events), told
                events, told, num_bytes = [], [], 0
                await self._answer.turns.take(ENTRIES_A_PASS)
            await self._reply.prepare(choice, self._answer.turns)
            events.append(self._reply.events(choice, piece))
            told.append(told_now)
            num_bytes += len(events[-1])
        yield b"".join(events), told

    def _event_headers(self) -> list[tuple[bytes, bytes]]:
        if not self._framed:
            return _EVENT_HEADERS
        return [*_EVENT_HEADERS, (FRAMES_HEADER.encode(), (self._answer.charge.ticket or NO_LEASE).encode())]

    async def _send_whole(self, send: Send) -> None:
        await keep_whole(self._answer, self._reply, self._note_first_token)
        await self._book_outcome()
        body = self._reply.body(self._answer.choices, self._answer.usage())
        await self._start(send, 200, _json_headers(body.num_bytes))
        for chunk in body.chunks(_CHUNK_BYTES):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            # A reader that keeps up never has a send wait.
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

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
        await self._start(send, reply.status, _json_headers(len(reply.body)) + headers)
        await send({"type": "http.response.body", "body": reply.body, "more_body": False})

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


async def keep_whole(answer: Answer, reply: Reply, on_piece: Callable[[], None] = lambda: None) -> None:
    """Read an answer to its end, and have a reply keep it. Calls `on_piece` whenever something comes."""
    async with aclosing(answer.batches()) as batches:
        async for batch in batches:
            on_piece()
            for choice, piece in batch:
                await reply.prepare(choice, answer.turns)
                reply.keep(choice, piece)


def note_outcome(record: RequestRecord, answer: Answer) -> None:
    """Write into a request's record what its answer cost so far and how it ended."""
    usage = answer.usage()
    record.prompt_tokens = usage.prompt_tokens
    record.cached_tokens = usage.prompt_tokens_details.cached_tokens
    record.output_tokens = usage.completion_tokens
    reasons = {str(choice.finish) for choice in answer.choices if choice.finish is not None}
    record.finish = record.finish or ",".join(sorted(reasons))


def _frame(events: bytes, batch: Batch) -> bytes:
    told = [ChoiceTokens(choice.index, choice.new_token_ids, piece.finish is not None) for choice, piece in batch]
    return frame(events, *told)


def _json_headers(num_bytes: int) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", b"application/json"), (b"content-length", str(num_bytes).encode())]
