"""An engine in this very process measured under one or more workloads, every request submitted at once.

Knows the engine only as something that completes prompts; which one, and how it was built, is for the caller.
"""

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from penstock.errors import ContextTooLong, RequestError
from penstock.request import SamplingParams, check_answer_fits
from penstock.tools.bench.catalogue import prefill_twin, steady_steps
from penstock.tools.bench.client import Measurement
from penstock.tools.bench.document import Run
from penstock.tools.bench.summary import ServiceLevel, summarise
from penstock.tools.bench.watcher import Watcher
from penstock.tools.bench.workload import Workload

WARM_UP_OUTPUT_TOKENS = 16


class Completed(Protocol):
    @property
    def token_ids(self) -> list[int]: ...

    @property
    def num_cached_tokens(self) -> int: ...

    @property
    def token_seconds(self) -> list[float]: ...


class Completer(Protocol):
    """`penstock.LLM`, as far as a benchmark sees it."""

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> Sequence[Completed]: ...


def with_prefill_twins(names: Iterable[str]) -> list[str]:
    """Return the names with the twin of each decode workload before it: their difference is the decoding alone."""
    wanted: dict[str, None] = {}
    for name in names:
        twin = prefill_twin(name)
        wanted |= dict.fromkeys([name] if twin is None else [twin, name])
    return list(wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineBench:
    """Runs workloads on one engine."""

    completer: Completer
    vocab_size: int
    max_context_tokens: int
    ignore_eos: bool = True
    warm_up_requests: int = 1
    service_level: ServiceLevel = field(default_factory=ServiceLevel)
    now: Callable[[], float] = time.perf_counter

    def run(self, workloads: Sequence[Workload], watcher: Watcher | None = None) -> Iterator[Run]:
        """Yield each workload's run when it is done; a decode workload finds its twin among those before it."""
        runs: dict[str, Run] = {}
        for workload in workloads:
            self._check_fits(workload)
            if watcher is not None:
                watcher.begin(workload.name, None)
            runs[workload.name] = self._run(workload, runs)
            yield runs[workload.name]

    def _check_fits(self, workload: Workload) -> None:
        for number, item in enumerate(workload.requests, 1):
            try:
                check_answer_fits(item.prompt.num_tokens, item.max_tokens, self.max_context_tokens)
            except ContextTooLong as error:
                raise RequestError(f"{workload.name}, request {number}: {error}", param=error.param) from error

    def _run(self, workload: Workload, earlier: Mapping[str, Run]) -> Run:
        warm_up = workload.warm_up(self.warm_up_requests)
        if warm_up.requests:
            self._generate(_shortened(warm_up))
        seconds, completions = self._generate(workload)
        measured = [
            (request, _measurement(completion, seconds))
            for request, completion in zip(workload.requests, completions, strict=True)
        ]
        at_once = replace(workload, rate=None, concurrency=None)
        summary = summarise(at_once, measured, self.service_level, seconds=seconds)
        run = msgspec.structs.replace(summary, counted_by="engine")
        twin = earlier.get(prefill_twin(workload.name) or "")
        if twin is None:
            return run
        per_token = (run.seconds - twin.seconds) / steady_steps(workload.name)
        return msgspec.structs.replace(run, decode_ms_per_token=per_token * 1000)

    def _generate(self, workload: Workload) -> tuple[float, Sequence[Completed]]:
        # A model smaller than the workloads' vocabulary has its tokens used again and again instead.
        prompts = [[token % self.vocab_size for token in workload.token_ids(item)] for item in workload.requests]
        params = [
            SamplingParams(max_tokens=item.max_tokens, temperature=workload.temperature, ignore_eos=self.ignore_eos)
            for item in workload.requests
        ]
        started = self.now()
        completions = self.completer.generate(prompts, params)
        return self.now() - started, completions


def _measurement(completion: Completed, seconds: float) -> Measurement:
    """A request as it went that was there from the beginning."""
    times = array("d", completion.token_seconds)
    return Measurement(
        sent=0.0,
        ended=times[-1] if times else seconds,
        token_times=times,
        cached_tokens=completion.num_cached_tokens,
        output_tokens=len(completion.token_ids),
    )


def _shortened(workload: Workload) -> Workload:
    requests = (replace(item, max_tokens=min(item.max_tokens, WARM_UP_OUTPUT_TOKENS)) for item in workload.requests)
    return replace(workload, requests=tuple(requests))
