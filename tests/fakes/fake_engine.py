"""An engine client without an engine: it writes down what it is asked and plays a script back."""

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.messages import EngineInfo, EngineStats, PromptLogprobs, TokenEvent, TokenLogprob
from penstock.engine.tokenizer import Tokenizer
from penstock.errors import EngineFailed, EngineUnavailable
from penstock.protocol.block_events import BlockChanges, BlockSnapshot
from penstock.request import FinishReason, SamplingParams
from penstock.server.terms import Terms

Step = TokenEvent | Exception | asyncio.Event  # an Event: wait until it is set


def prompt_logprobs(num_tokens: int, num_top: int) -> PromptLogprobs:
    """Made-up scores of so many tokens: the best are tokens 65 and on, a nat apart, and the last of three cannot be."""
    best = [-0.25, -1.25, float("-inf")][:num_top]
    ids = array("i", [65 + rank for rank in range(len(best))] * num_tokens)
    own = array("f", [-1.25] * num_tokens)
    return PromptLogprobs(own.tobytes(), len(best), ids.tobytes(), array("f", best * num_tokens).tobytes())


@dataclass
class Submitted:
    prompt: list[int]
    params: SamplingParams
    request_id: str
    arrival: float
    tenant: str
    adapter: str
    terms: Terms
    num_public_tokens: int = 0
    num_answer_tokens: int = 0
    call_prompts: list[int] | None = None
    call_answers: int = 1
    follows: str | None = None


@dataclass
class FakeStream:
    """Plays its steps; once aborted it ends with an ABORT event, as the engine's streams do."""

    request: Submitted
    steps: list[Step]
    on_abort: Callable[[str], None]
    _aborted: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: bool = False
    _taken: asyncio.Event = field(default_factory=asyncio.Event)
    _arrived: TokenEvent | Exception | None = None
    _player: "asyncio.Task[None] | None" = None

    @property
    def has_more(self) -> bool:
        return self._arrived is not None

    @property
    def num_waiting_tokens(self) -> int:
        return len(self._arrived.token_ids) if isinstance(self._arrived, TokenEvent) else 0

    def listen(self, on_arrival: Callable[[], None]) -> None:
        self._player = asyncio.create_task(self._play(on_arrival))

    def take(self, max_tokens: int | None = None) -> TokenEvent | None:
        arrived, self._arrived = self._arrived, None
        self._taken.set()
        if isinstance(arrived, Exception):
            raise arrived
        return arrived

    async def _play(self, on_arrival: Callable[[], None]) -> None:
        """Let one step arrive when the one before was taken."""
        while not self._ended:
            try:
                self._arrived = await self._next()
            except Exception as error:  # noqa: BLE001 (the script's own)
                self._arrived = error
            self._taken.clear()
            on_arrival()
            if not self._ended:
                await self._taken.wait()

    async def _next(self) -> TokenEvent:
        await asyncio.sleep(0)
        while not self._ended:
            step = self.steps.pop(0) if self.steps else EngineFailed("the script ended")
            if isinstance(step, asyncio.Event):
                await self._wait(step)
                continue
            if self._aborted.is_set():
                step = TokenEvent(request_id=self.request.request_id, finish=FinishReason.ABORT)
            if isinstance(step, Exception):
                self._ended = True
                raise step
            self._ended = step.finish is not None
            return step
        raise AssertionError("nothing comes behind the last step")

    def abort(self, reason: FinishReason = FinishReason.ABORT) -> None:
        if not self._ended:
            self._aborted.set()
            self._taken.set()
            self.on_abort(self.request.request_id)

    async def _wait(self, event: asyncio.Event) -> None:
        waits = [asyncio.create_task(event.wait()), asyncio.create_task(self._aborted.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


class FakeEngine:
    """Give it `script`, a function from what was submitted to the steps of its stream."""

    def __init__(self, tokenizer: Tokenizer, script: Callable[[Submitted], list[Step]] | None = None) -> None:
        self.tokenizer = tokenizer
        self.script = script or (lambda request: self.say(request, "Hello, wörld! 🙂"))
        self.submitted: list[Submitted] = []
        self.aborted: list[str] = []
        self.left_calls: list[str] = []
        self.connected = True
        self.on_blocks: Callable[[BlockSnapshot | BlockChanges | None], None] | None = None
        self.is_watched = False
        self.stats = EngineStats()
        self.stats_age_seconds = 0.0
        self.pulse_age_seconds = 0.0
        self.info: EngineInfo | None = EngineInfo(
            epoch="1",
            max_context_tokens=512,
            max_open_requests=1024,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=list(tokenizer.eos_token_ids),
            num_blocks=32,
            block_tokens=16,
            device="cpu",
            timeline=[],
            settings=[],
        )

    async def wait_ready(self) -> EngineInfo:
        if not self.connected:
            await asyncio.Event().wait()
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
        num_answer_tokens: int = 0,
        call_prompts: list[int] | None = None,
        call_answers: int = 1,
        follows: str | None = None,
        **terms: Any,
    ) -> FakeStream:
        if not self.connected:
            raise EngineUnavailable("the engine is restarting; try again in a few seconds")
        request = Submitted(
            prompt,
            params,
            request_id,
            arrival,
            tenant,
            adapter,
            Terms(**terms),
            num_public_tokens,
            num_answer_tokens,
            call_prompts,
            call_answers,
            follows,
        )
        self.submitted.append(request)
        return FakeStream(request, self.script(request), self.aborted.append)

    def leave_call(self, first: str) -> None:
        self.left_calls.append(first)

    def watch_blocks(self) -> None:
        self.is_watched = True

    def leave_blocks(self) -> None:
        self.is_watched = False

    async def close(self) -> None:
        self.connected = False

    def say(
        self, request: Submitted, text: str, *, chunk: int = 1, cached: int = 0, finish: FinishReason | None = None
    ) -> list[Step]:
        """Return the events of an answer, `chunk` tokens each: it ends with the end token or at max_tokens."""
        end = self.tokenizer.eos_token_id
        assert end is not None
        token_ids = [*self.tokenizer.encode(text, add_special=False), end]
        limit = request.params.max_tokens
        if limit is not None and len(token_ids) > limit:
            token_ids, finish = token_ids[:limit], finish or FinishReason.LENGTH
        finish = finish or FinishReason.STOP
        steps: list[Step] = [
            self.event(request, token_ids[start : start + chunk], cached) for start in range(0, len(token_ids), chunk)
        ]
        last = steps[-1]
        assert isinstance(last, TokenEvent)
        last.finish = finish
        last.stop_token = end if finish is FinishReason.STOP else None
        return steps

    def event(self, request: Submitted, token_ids: list[int], cached: int = 0) -> TokenEvent:
        """Return one event, with made-up scores where the request asks for them."""
        event = TokenEvent(request_id=request.request_id, token_ids=token_ids, num_cached_tokens=cached)
        num_top = request.params.logprobs
        if num_top is not None:
            event.logprobs = [
                TokenLogprob(token_id, -0.5, [token_id, 0, 1][:num_top], [-0.5, -2.0, float("-inf")][:num_top])
                for token_id in token_ids
            ]
        if request.params.prompt_logprobs is not None:
            event.prompt_logprobs = prompt_logprobs(len(request.prompt) - 1, request.params.prompt_logprobs)
        return event
