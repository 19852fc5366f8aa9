"""A model in this very process: prompts in, completions out, no server.

The same engine, scheduler and text assembly as the server's, without the sockets between them. Threads take turns.
"""

import asyncio
import contextlib
import gc
import operator
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

import msgspec

from penstock.config import gather
from penstock.engine.builder import build_engine
from penstock.engine.messages import PromptLogprobs, Submit, TokenEvent, TokenLogprob
from penstock.engine.scheduler.intake import check_submit
from penstock.engine.timeline import Timeline
from penstock.engine.tokenizer import Tokenizer
from penstock.errors import ConfigError, EngineFailed, EngineUnavailable, InvalidParameter, RequestError, TemplateFailed
from penstock.models import store
from penstock.protocol.openai_chat import ChatMessage, check_messages
from penstock.protocol.wire import refuse_nul
from penstock.request import FinishReason, SamplingParams, check_answer_fits, check_text_tokens, prompt_names
from penstock.server.chat_template import ChatTemplate
from penstock.server.template_file import read_template
from penstock.server.text_assembly import TextAssembler

Prompt = str | Sequence[int]
Progress = Callable[[int, int, str], None]
# Young garbage is collected so often: the requests of a call are gone through the first time, for 4 to 15 ms.
_COLLECTION_SECONDS = 30.0
# Before each step requests are queued whose prompts fill it, but not more than these.
_MOST_QUEUED = 64


@dataclass(frozen=True, slots=True)
class Completion:
    """One prompt's answer."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    token_seconds: list[float]  # since the call, when each token was there
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # of the prompt's tokens; the first has none


@dataclass(slots=True)
class _Open:
    """A request under way."""

    place: int  # among those of the call
    assembler: TextAssembler
    prompt: list[int]
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    token_seconds: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int = 0

    def take(self, event: TokenEvent, seconds: float) -> None:
        """Take what came so many seconds after the call."""
        if event.error is not None:
            raise EngineFailed(event.error)
        before = self.assembler.num_tokens
        piece = self.assembler.push(event)
        count = self.assembler.num_tokens - before
        self.text.append(piece.text)
        self.token_ids += event.token_ids[:count]
        self.token_seconds += [seconds] * count
        self.logprobs += (event.logprobs or [])[:count]
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)

    def completion(self, params: SamplingParams) -> Completion:
        assert self.assembler.finish is not None
        return Completion(
            text="".join(self.text),
            token_ids=self.token_ids,
            finish_reason=self.assembler.finish,
            num_prompt_tokens=len(self.prompt),
            num_cached_tokens=self.num_cached_tokens,
            token_seconds=self.token_seconds,
            logprobs=self.logprobs if params.logprobs is not None else None,
            prompt_logprobs=self._read_prompt() if params.prompt_logprobs is not None else None,
        )

    def _read_prompt(self) -> list[TokenLogprob | None]:
        assert self.prompt_logprobs is not None
        return [None, *self.prompt_logprobs.read(0, self.prompt[1:])]


class _Call:
    """The requests of one call, under way and done."""

    def __init__(self, params: list[SamplingParams], began: float) -> None:
        self.began = began
        self.open: dict[str, _Open] = {}
        self._params = params
        self._done: dict[int, Completion] = {}

    def take(self, events: list[tuple[bytes, TokenEvent]]) -> list[str]:
        """Take what requests got; return which of them are done. What is left to do for those is done beside a step."""
        seconds = time.monotonic() - self.began
        ended = []
        for _, event in events:
            request = self.open.get(event.request_id)
            if request is None:
                continue
            request.take(event, seconds)
            if request.assembler.finish is not None:
                del self.open[event.request_id]
                self._done[request.place] = request.completion(self._params[request.place])
                ended.append(event.request_id)
        return ended

    @property
    def completions(self) -> list[Completion]:
        return [self._done[place] for place in range(len(self._params))]


class LLM:
    """A loaded model. Options are those of `penstock serve`, by their Python names.

    On a GPU torch keeps `threads` threads in the thread that made it; on a CPU it has as many as before.

    >>> llm = LLM("smollm2-135m")
    >>> llm.generate(["The capital of France is"], SamplingParams(max_tokens=8, temperature=0))[0].text
    """

    def __init__(
        self, model: str | os.PathLike[str] = "smollm2-135m", *, progress: Progress | None = None, **options: Any
    ) -> None:
        model = _model_name(model)
        sourced = gather({"model": model, **options}, environ={})
        template = sourced.options.chat_template
        own_template = read_template(template) if template is not None else None
        files = store.resolve(
            model,
            cache_dir=sourced.options.cache_dir,
            revision=sourced.options.revision,
            load_format=sourced.options.load_format,
        )
        # First: a tokenizer that cannot be used is found before the weights are read.
        self.tokenizer = Tokenizer.load(files)
        built = build_engine(sourced, files, Timeline(time.monotonic()), for_batches=True, progress=progress)
        self._chat_template = own_template or self.tokenizer.chat_template
        self.config = built.config
        self.settings = built.settings
        self.spec = built.spec
        self._engine = built.engine
        self._next_id = 0
        self._is_closed = False
        self._process_id = os.getpid()
        # A run takes every event of the engine, others' too. Whoever handles a Ctrl-C within one may close the model.
        self._turn = threading.RLock()

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Continue each prompt (text or token ids). One `SamplingParams` for all, or one for each.

        Raises RequestError before any of them runs, where one cannot. Threads that call at once are answered in turn.
        """
        began = time.monotonic()
        if self._is_forked:
            raise EngineUnavailable("this LLM belongs to the process that made it; make another behind the fork")
        with _young_collections() as collect:
            ids = self._all_ids(prompts)
            each = self._params_for(ids, params)
            with self._turn:
                return self._run(ids, each, began, collect)

    def chat(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None) -> Completion:
        """Answer a conversation, through the model's chat template. Messages are those of /v1/chat/completions."""
        checked = check_messages(messages)
        if self._chat_template is None:
            right = "use generate(), or give a Jinja file as chat_template"
            raise TemplateFailed(f"this model has no chat template; {right}", param="messages")
        text = _run_to_end(self._render(self._chat_template, checked))
        ids = self.tokenizer.encode(text, add_special=False)
        check_text_tokens(ids, self.spec.vocab_size, param="messages")
        return self.generate([ids], params)[0]

    def score(self, prompts: Prompt | Iterable[Prompt]) -> list[list[float | None]]:
        """Return each prompt token's log-probability given those before it; the first has none."""
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        return [
            [None if score is None else score.logprob for score in done.prompt_logprobs or []]
            for done in self.generate(prompts, params)
        ]

    def close(self) -> None:
        """Let go of the model, behind the runs of other threads. What is asked afterwards raises EngineUnavailable."""
        if self._is_forked:
            return  # it is its maker's to close
        with self._turn:
            self._is_closed = True
            self._engine.runner.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _is_forked(self) -> bool:
        """Whether this is a copy in a process that was forked off: threads do not come along, and a step has one."""
        return os.getpid() != self._process_id

    def _all_ids(self, prompts: Prompt | Iterable[Prompt]) -> list[list[int]]:
        listed = _as_list(prompts)
        return [self._to_ids(prompt, name) for prompt, name in zip(listed, prompt_names(len(listed)), strict=True)]

    def _to_ids(self, prompt: Prompt, name: str) -> list[int]:
        if not isinstance(prompt, str):
            return _token_ids(prompt, name)
        refuse_nul(prompt, (name,))
        token_ids = self.tokenizer.encode(prompt, add_special=True)
        check_text_tokens(token_ids, self.spec.vocab_size, param=name)
        return token_ids

    def _params_for(
        self, prompts: list[list[int]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None:
            params = SamplingParams()
        right = "give SamplingParams, or a list with one for each prompt"
        listed = [params] if isinstance(params, SamplingParams) else _listed("params", params, right)
        for place, chosen in enumerate(listed):
            if not isinstance(chosen, SamplingParams):
                raise InvalidParameter("params", chosen, right)
            listed[place] = chosen.plain()
        if isinstance(params, SamplingParams):
            return listed * len(prompts)
        if len(listed) != len(prompts):
            message = f"there are {len(listed)} params for {len(prompts)} prompts; give one, or one for each"
            raise RequestError(message, param="params")
        return listed

    def _run(
        self, prompts: list[list[int]], params: list[SamplingParams], began: float, after_step: Callable[[], None]
    ) -> list[Completion]:
        """Run requests to their ends, keeping the engine's queue within its bound. The longest answers start first.

        Queueing them takes time: the first step runs as soon as there is enough for it, the others come meanwhile.
        """
        if self._is_closed:
            raise EngineUnavailable("this LLM was closed; make another")
        names = prompt_names(len(prompts))
        submits = [self._checked(*asked) for asked in zip(prompts, params, names, strict=True)]
        call = _Call(params, began)
        longest = self.config.max_context_tokens
        waiting = sorted(range(len(prompts)), key=lambda index: -(params[index].max_tokens or longest))[::-1]
        limit = self.config.max_running + self.config.max_waiting
        with _whole_steps() as handle_signals:
            try:
                while waiting or call.open:
                    room = self.config.max_step_tokens
                    last = max(0, len(waiting) - _MOST_QUEUED)
                    while len(waiting) > last and room > 0 and len(call.open) < limit:
                        place = waiting.pop()
                        room -= len(prompts[place])
                        self._submit(submits[place], place, call)
                    if ended := call.take(self._engine.step()):
                        self._engine.abort(b"", ended, FinishReason.STOP)
                    after_step()
                    handle_signals()
            finally:
                self._engine.abort(b"", list(call.open))
                while self._engine.has_work:
                    self._engine.step()
        return call.completions

    def _checked(self, prompt: list[int], params: SamplingParams, name: str) -> Submit:
        """Return a request that the engine will not refuse. Raises RequestError."""
        submit = Submit(request_id=str(self._next_id), prompt=prompt, params=params, arrival=time.monotonic())
        self._next_id += 1
        max_context_tokens = self.config.max_context_tokens
        check_submit(submit, max_context_tokens=max_context_tokens, vocab_size=self.spec.vocab_size, prompt=name)
        check_answer_fits(len(prompt), params.max_tokens, max_context_tokens, min_tokens=params.min_tokens, prompt=name)
        return submit

    def _submit(self, submit: Submit, place: int, call: _Call) -> None:
        now = time.monotonic()
        call.open[submit.request_id] = _Open(place, TextAssembler(self.tokenizer, submit.params), submit.prompt)
        call.take(self._engine.submit(msgspec.structs.replace(submit, arrival=now)))

    async def _render(self, template: str, messages: list[ChatMessage]) -> str:
        chat_template = ChatTemplate(
            template, bos_token=self.tokenizer.bos_text or "", eos_token=self.tokenizer.eos_text or ""
        )
        try:
            return await chat_template.render([message.for_template() for message in messages])
        finally:
            await chat_template.close()


def _run_to_end(work: Coroutine[Any, Any, str]) -> str:
    """Return what comes of the work. A thread that runs an event loop, as a notebook's does, cannot run another."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


@contextlib.contextmanager
def _whole_steps() -> Iterator[Callable[[], None]]:
    """Keep signals for the end of a step, Ctrl-C and alarms alike: raised in one, they would leave plans never settled.

    Yields what is to be called after each step: it handles those that came.
    """
    held: dict[int, Callable[[int, FrameType | None], Any]] = {}
    came: dict[int, FrameType | None] = {}
    # Python runs handlers in its main thread alone, and those that it did not set are not its to replace.
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in sorted(signal.valid_signals(), reverse=True)}
        held = {number: handler for number, handler in handlers.items() if callable(handler)}

    def hold(number: int, frame: FrameType | None) -> None:
        came[number] = frame

    def handle() -> None:
        while came:
            number, frame = came.popitem()
            held[number](number, frame)

    try:
        for number in held:
            signal.signal(number, hold)
        yield handle
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        handle()


@contextlib.contextmanager
def _young_collections() -> Iterator[Callable[[], None]]:
    """Collect garbage now and then, among young objects alone: a full collection goes through all that was loaded.

    Yields what is to be called after each step.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    last = time.monotonic()

    def collect() -> None:
        nonlocal last
        if time.monotonic() - last >= _COLLECTION_SECONDS:
            gc.collect(1)
            last = time.monotonic()

    try:
        yield collect
    finally:
        if was_enabled:
            gc.enable()


def _model_name(model: object) -> str:
    """Return a model's name, or its path as a text."""
    name = os.fspath(model) if isinstance(model, os.PathLike) else model
    if not isinstance(name, str):
        raise ConfigError("--model", name, "give an alias, a path or a hub id, as a text or a path")
    return name


def _token_ids(prompt: Sequence[int], name: str) -> list[int]:
    """Return whole numbers of any library as Python's own. Raises InvalidParameter where they are something else."""
    right = "give a text or a list of token ids"
    listed = _listed(name, prompt, right)
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert(listed, list[int])
    token_ids = []
    for item in listed:
        try:
            token_ids.append(operator.index(item))
        except TypeError:
            raise InvalidParameter(name, item, right) from None
        if isinstance(item, bool):
            raise InvalidParameter(name, item, right)
    return token_ids


def _as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt counts as a list of one: a text, or a run of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    listed = _listed("prompt", prompts, "give a text or a list of token ids, or a list of such prompts")
    return [listed] if listed and _is_number(listed[0]) else listed


def _is_number(item: object) -> bool:
    """Whether it is one number, be it another library's: an array without dimensions is."""
    return isinstance(item, int) or getattr(item, "ndim", None) == 0


def _listed(param: str, value: object, right: str) -> list[Any]:
    """Return what a list, a tuple, an array or a generator holds. Raises InvalidParameter for anything else."""
    is_other = isinstance(value, str | bytes | Mapping | Set) or getattr(value, "ndim", 1) == 0
    if is_other or not isinstance(value, Iterable):
        raise InvalidParameter(param, value, right)
    return list(value)
