"""The engine as an API worker sees it: prompts in, streams of token events out, over one Unix socket.

Notices by itself when the engine goes away and when it is back. No torch; one event loop.
"""

import asyncio
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from penstock.engine.messages import (
    Abort,
    ArrivedEvent,
    ArrivedEvents,
    EngineInfo,
    EngineStats,
    ExportedPrefix,
    ExportPrefix,
    Goodbye,
    Hello,
    ImportedPrefix,
    ImportPrefix,
    LeaveBlocks,
    Submit,
    ToEngine,
    TokenEvent,
    TokenLogprob,
    WatchBlocks,
    decode_from_engine,
    decode_logprobs,
    encode,
)
from penstock.engine.pulse import age_seconds, pulse_path
from penstock.errors import EngineFailed, EngineUnavailable
from penstock.protocol.block_events import BlockChanges, BlockSnapshot
from penstock.request import NO_TARGETS, OWN_TARGETS, FinishReason, SamplingParams, TargetOrigins, Targets, Tier

_EVENTS_AT_ONCE = 1024  # a few milliseconds' worth


class TokenStream(AsyncIterator[TokenEvent]):
    """One request's events. Those that wait together become one; the last carries `finish`.

    A reader may be behind by a whole long answer: what waits for it is packed, four bytes a token.

    Iterate over it, or `listen` and `take`: one reader can so follow many streams.
    """

    def __init__(self, client: "EngineClient", request_id: str) -> None:
        self._client = client
        self._request_id = request_id
        self._token_ids = array("i")  # that wait
        self._logprobs: deque[tuple[int, msgspec.Raw]] = deque()  # theirs, and of how many tokens, where asked for
        self._first: ArrivedEvent | None = None  # of those that wait, while none of its tokens was taken
        self._last: ArrivedEvent | None = None  # of those that wait
        self._arrived = asyncio.Event()
        self._on_arrival: Callable[[], None] | None = None
        self._failure: EngineFailed | None = None
        self._ended = False

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> TokenEvent:
        if self._ended:
            raise StopAsyncIteration
        while not self.has_more:
            self._arrived.clear()
            await self._arrived.wait()
        event = self.take()
        assert event is not None
        return event

    @property
    def has_more(self) -> bool:
        """Whether `take` has something to give, or to raise."""
        return self._last is not None or (self._failure is not None and not self._ended)

    @property
    def num_waiting_tokens(self) -> int:
        """How many tokens have arrived and were not taken."""
        return len(self._token_ids)

    def listen(self, on_arrival: Callable[[], None]) -> None:
        """Have this called whenever something arrives, and now where something has."""
        self._on_arrival = on_arrival
        if self.has_more:
            on_arrival()

    def take(self, max_tokens: int | None = None) -> TokenEvent | None:
        """Return what has arrived, up to so many tokens; None where nothing has.

        With log-probabilities that is one step's at the least. Raises EngineFailed behind the last event of an engine
        that is gone.
        """
        if self._last is None:
            if self._failure is None or self._ended:
                return None
            self._ended = True
            raise self._failure
        num_tokens = len(self._token_ids) if max_tokens is None else max_tokens
        logprobs = None
        if self._logprobs:
            num_tokens, logprobs = self._take_logprobs(num_tokens)
        event = TokenEvent(
            request_id=self._request_id, token_ids=self._token_ids[:num_tokens].tolist(), logprobs=logprobs
        )
        del self._token_ids[:num_tokens]
        if self._first is not None:
            _tell_of_prompt(event, self._first)
            self._first = None
        # What ends an answer before its time comes alone: whoever raises it has been given every token before.
        is_early = self._last.finish in (FinishReason.ERROR, FinishReason.ABORT)
        if not self._token_ids and not (is_early and event.token_ids):
            _tell_of_end(event, self._last)
            self._last = None
            self._ended = event.finish is not None
        return event

    def _take_logprobs(self, max_tokens: int) -> tuple[int, list[TokenLogprob]]:
        """Return for how many tokens there are log-probabilities in whole steps, one at the least, and those."""
        num_tokens, logprobs = self._logprobs.popleft()
        taken = decode_logprobs(logprobs)
        while self._logprobs and num_tokens + self._logprobs[0][0] <= max_tokens:
            num_more, logprobs = self._logprobs.popleft()
            num_tokens += num_more
            taken += decode_logprobs(logprobs)
        return num_tokens, taken

    def abort(self, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ask the engine to stop; it frees the request within a step. Does nothing once the request has ended."""
        self._client.abort(self._request_id, reason)

    def push(self, event: ArrivedEvent) -> None:
        """Take an event from the engine."""
        self._token_ids.extend(event.token_ids)
        if event.logprobs:
            event.logprobs = event.logprobs.copy()  # or the whole frame would wait, with what others got
            self._logprobs.append((len(event.token_ids), event.logprobs))
        if self._last is None:
            self._first = event
        self._last = event
        self._tell()

    def fail(self, failure: EngineFailed) -> None:
        """The engine is gone: what has arrived is still given out, then the failure is raised."""
        self._failure = failure
        self._tell()

    def _tell(self) -> None:
        self._arrived.set()
        if self._on_arrival is not None:
            self._on_arrival()


def _look_at_failure(sent: "asyncio.Task[Any]") -> None:
    """Mark a failed send as seen."""
    if not sent.cancelled():
        sent.exception()


def _tell_of_prompt(event: TokenEvent, first: ArrivedEvent) -> None:
    """Have an event tell what came with a request's first token."""
    event.prompt_logprobs = first.prompt_logprobs
    event.num_cached_tokens = first.num_cached_tokens
    event.prompt = first.prompt


def _tell_of_end(event: TokenEvent, last: ArrivedEvent) -> None:
    """Have an event tell how a request ended, where it did."""
    event.finish = last.finish
    event.stop_token = last.stop_token
    event.error_code = last.error_code
    event.error = last.error
    event.error_param = last.error_param
    event.retry_after_seconds = last.retry_after_seconds


class EngineClient:
    """A connection to the engine process. Make it with `connect`."""

    def __init__(self, socket_path: str, identity: bytes) -> None:
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self._stats_at: float | None = None
        self._pulse_path = pulse_path(socket_path)
        self.on_blocks: Callable[[BlockSnapshot | BlockChanges | None], None] | None = None  # None: the engine is gone
        self._streams: dict[str, TokenStream] = {}
        self._answers: dict[str, asyncio.Future[ExportedPrefix | ImportedPrefix]] = {}
        self._ready = asyncio.Event()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        # Queue nothing for an engine that is not there; look for a new one often.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._socket.connect(f"ipc://{socket_path}")
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._receive())]

    @classmethod
    async def connect(cls, socket_path: str, identity: bytes) -> "EngineClient":
        """Return a client at once; `wait_ready` tells when the engine answers."""
        return cls(socket_path, identity)

    @property
    def connected(self) -> bool:
        """Whether requests can be submitted now."""
        return self._ready.is_set()

    @property
    def stats_age_seconds(self) -> float:
        return float("inf") if self._stats_at is None else time.monotonic() - self._stats_at

    @property
    def pulse_age_seconds(self) -> float:
        """How long ago the engine process was last seen alive, whatever its step does."""
        return age_seconds(self._pulse_path)

    async def wait_ready(self) -> EngineInfo:
        """Wait until the engine can serve."""
        await self._ready.wait()
        assert self.info is not None
        return self.info

    def submit(
        self,
        *,
        prompt: list[int],
        params: SamplingParams,
        request_id: str,
        arrival: float,
        tenant: str = "",
        adapter: str = "",
        num_public_tokens: int = 0,
        weight: float = 1.0,
        priority: int = 0,
        targets: Targets = NO_TARGETS,
        target_origins: TargetOrigins = OWN_TARGETS,
        deadline_seconds: float | None = None,
        best_effort: bool = False,
        has_moved: bool = False,
        tier: Tier = Tier.ONLINE,
        num_answer_tokens: int = 0,
        call_prompts: list[int] | None = None,
        call_answers: int = 1,
        follows: str | None = None,
    ) -> TokenStream:
        """Send a request. Raises EngineUnavailable while there is no engine to take it."""
        if not self.connected:
            raise EngineUnavailable("the engine is starting or restarting; try again in a few seconds")
        stream = TokenStream(self, request_id)
        self._streams[request_id] = stream
        self._send(
            Submit(
                request_id=request_id,
                prompt=prompt,
                params=params,
                arrival=arrival,
                tenant=tenant,
                adapter=adapter,
                num_public_tokens=num_public_tokens,
                weight=weight,
                priority=priority,
                targets=targets,
                target_origins=target_origins,
                deadline_seconds=deadline_seconds,
                best_effort=best_effort,
                has_moved=has_moved,
                tier=tier,
                num_answer_tokens=num_answer_tokens,
                call_prompts=call_prompts,
                call_answers=call_answers,
                follows=follows,
            )
        )
        return stream

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Stop a request that still runs."""
        if request_id in self._streams and self.connected:
            self._send(Abort([request_id], reason))

    def leave_call(self, first: str) -> None:
        """Tell the engine that no more requests follow this one, whether or not it still runs."""
        if self.connected:
            self._send(Abort([first]))

    async def export_prefix(
        self, tokens: list[int], *, request_id: str, tenant: str = "", adapter: str = "", num_public_tokens: int = 0
    ) -> list[bytes]:
        """Return the KV of the leading whole blocks of `tokens`, as far as the engine has them cached."""
        message = ExportPrefix(
            request_id=request_id,
            tokens=tokens,
            tenant=tenant,
            adapter=adapter,
            num_public_tokens=num_public_tokens,
        )
        answer = await self._ask(request_id, message)
        assert isinstance(answer, ExportedPrefix)
        return answer.blocks

    async def import_prefix(
        self,
        tokens: list[int],
        blocks: list[bytes],
        *,
        request_id: str,
        tenant: str = "",
        adapter: str = "",
        num_public_tokens: int = 0,
    ) -> int:
        """Give the engine blocks that another of the same model exported; return how many tokens it now finds."""
        message = ImportPrefix(
            request_id=request_id,
            tokens=tokens,
            blocks=blocks,
            tenant=tenant,
            adapter=adapter,
            num_public_tokens=num_public_tokens,
        )
        answer = await self._ask(request_id, message)
        assert isinstance(answer, ImportedPrefix)
        return answer.num_tokens

    async def _ask(self, request_id: str, message: ToEngine) -> ExportedPrefix | ImportedPrefix:
        if not self.connected:
            raise EngineUnavailable("the engine is starting or restarting; try again in a few seconds")
        future: asyncio.Future[ExportedPrefix | ImportedPrefix] = asyncio.get_running_loop().create_future()
        self._answers[request_id] = future
        self._send(message)
        return await future

    def watch_blocks(self) -> None:
        """Have `on_blocks` told of every block in the engine's cache, and then of every change."""
        if self.connected:
            self._send(WatchBlocks())

    def leave_blocks(self) -> None:
        """Have `on_blocks` told no more."""
        if self.connected:
            self._send(LeaveBlocks())

    def say_goodbye(self, identity: bytes) -> None:
        """Tell the engine that another client is gone, so that its requests end."""
        if self.connected:
            self._send(Goodbye(identity))

    async def close(self) -> None:
        """Let go of the socket and of every stream."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._lose("the server is closing")
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()

    def _send(self, message: ToEngine) -> None:
        # The queue has no limit, so that a send never waits. It fails only while the engine is going away, and then
        # every stream is about to hear of that.
        asyncio.ensure_future(self._socket.send(encode(message), zmq.NOBLOCK)).add_done_callback(_look_at_failure)

    async def _receive(self) -> None:
        num_received = 0
        while True:
            message = decode_from_engine(await self._socket.recv())
            match message:
                case ArrivedEvents(events):
                    for event in events:
                        self._deliver(event)
                    num_received += len(events)
                case EngineStats():
                    self.stats = message
                    self._stats_at = time.monotonic()
                case ExportedPrefix(request_id) | ImportedPrefix(request_id):
                    answer = self._answers.pop(request_id, None)
                    if answer is not None and not answer.done():
                        answer.set_result(message)
                case EngineInfo():
                    self.info = message
                    self._ready.set()
                case BlockSnapshot() | BlockChanges():
                    if self.on_blocks is not None:
                        self.on_blocks(message)
            if num_received >= _EVENTS_AT_ONCE:
                # While messages wait, to receive one does not give the loop to anybody else.
                num_received = 0
                await asyncio.sleep(0)

    def _deliver(self, event: ArrivedEvent) -> None:
        stream = self._streams.get(event.request_id)
        if stream is None:
            return
        if event.finish is not None:
            del self._streams[event.request_id]
        stream.push(event)

    async def _watch(self) -> None:
        """Follow the connection: greet an engine that appears, end the streams of one that is gone."""
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                await self._socket.send(encode(Hello()))
            else:
                self._lose("the engine stopped while it worked on this request; try it again")

    def _lose(self, why: str) -> None:
        self._ready.clear()
        self._stats_at = None
        if self.on_blocks is not None:
            self.on_blocks(None)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(EngineFailed(why))
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(EngineFailed(why))
