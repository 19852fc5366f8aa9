"""Workloads on an engine in this process; a fake one, with a clock that it moves itself."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from penstock.errors import RequestError
from penstock.request import SamplingParams
from penstock.tools.bench.catalogue import named_workload
from penstock.tools.bench.offline_bench import OfflineBench
from penstock.tools.bench.shape import parse_shape
from penstock.tools.bench.summary import ServiceLevel
from penstock.tools.bench.workload import FixedPrompt, PlannedRequest, Workload


@dataclass(frozen=True)
class FakeCompletion:
    token_ids: list[int]
    token_seconds: list[float]
    num_cached_tokens: int = 0


@dataclass
class FakeEngine:
    """A step takes ten milliseconds, and the prompts' a second."""

    time: float = 0.0
    calls: list[tuple[list[list[int]], list[SamplingParams]]] = field(default_factory=list)
    shorter_by: int = 0

    def now(self) -> float:
        return self.time

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> Sequence[FakeCompletion]:
        self.calls.append((prompts, params))
        lengths = [(item.max_tokens or 0) - self.shorter_by for item in params]
        self.time += 1.0 + 0.01 * (max(lengths) - 1)
        return [
            FakeCompletion([7] * length, [1.0 + 0.01 * index for index in range(length)], num_cached_tokens=2)
            for length in lengths
        ]


def bench(engine: FakeEngine, *, vocab_size: int = 50_000, warm_up: int = 0) -> OfflineBench:
    return OfflineBench(
        completer=engine, vocab_size=vocab_size, max_context_tokens=1024, warm_up_requests=warm_up, now=engine.now
    )


def workload(shape: str = "4x8+101") -> Workload:
    return Workload(name=shape, requests=parse_shape(shape).requests(), temperature=0.6)


def test_throughput_is_over_the_time_of_the_whole() -> None:
    (run,) = bench(FakeEngine()).run([workload()])
    assert run.seconds == pytest.approx(2.0)
    assert run.output_tokens_per_second == pytest.approx(404 / 2)
    assert run.input_tokens_per_second == pytest.approx(32 / 2)
    assert run.counted_by == "engine"
    assert run.cached_tokens == 8


def test_latencies_count_from_the_beginning_of_the_whole() -> None:
    engine = FakeEngine()
    level = ServiceLevel(ttft_ms=1100.0, time_per_token_ms=10.5)
    (run,) = replace(bench(engine), service_level=level).run([workload()])
    assert run.ttft_ms is not None and run.ttft_ms.p50 == pytest.approx(1000.0)
    assert run.time_per_token_ms is not None and run.time_per_token_ms.p99 == pytest.approx(10.0)
    assert run.inter_token_ms is not None and run.inter_token_ms.count == 400
    assert run.end_to_end_ms is not None and run.end_to_end_ms.max == pytest.approx(2000.0)
    assert run.goodput is not None and run.goodput.requests_per_second == pytest.approx(4 / 2)
    assert len(run.requests) == 4


def test_requests_carry_the_workloads_tokens_lengths_and_temperature() -> None:
    engine = FakeEngine()
    load = workload()
    list(bench(engine).run([load]))
    ((prompts, params),) = engine.calls
    assert prompts == [list(request.prompt.token_ids()) for request in load.requests]
    assert params == [SamplingParams(max_tokens=101, temperature=0.6, ignore_eos=True)] * 4


def test_a_decode_workload_less_its_prefill_is_the_time_per_token() -> None:
    first, decode = bench(FakeEngine()).run([named_workload("first1"), named_workload("decode1")])
    assert first.decode_ms_per_token is None
    assert decode.decode_ms_per_token == pytest.approx(10.0)


def test_the_warm_up_is_short_unmeasured_and_of_other_tokens() -> None:
    engine = FakeEngine()
    (run,) = bench(engine, warm_up=2).run([workload()])
    (warm_prompts, warm_params), (prompts, _) = engine.calls
    assert len(warm_prompts) == 2
    assert {item.max_tokens for item in warm_params} == {16}
    assert not {tuple(prompt) for prompt in warm_prompts} & {tuple(prompt) for prompt in prompts}
    assert run.seconds == pytest.approx(2.0)


def test_a_small_vocabulary_folds_the_tokens() -> None:
    engine = FakeEngine()
    list(bench(engine, vocab_size=100).run([workload()]))
    assert max(token for prompt in engine.calls[0][0] for token in prompt) < 100


def test_short_answers_are_counted() -> None:
    (run,) = bench(FakeEngine(shorter_by=1)).run([workload()])
    assert run.num_short == 4


def test_a_request_that_does_not_fit_is_named_and_the_runs_before_it_are_there() -> None:
    short, long = PlannedRequest(FixedPrompt([1] * 8), 4), PlannedRequest(FixedPrompt([1] * 1022), 4)
    engine = FakeEngine()
    runs = bench(engine, warm_up=1).run([workload(), Workload(name="a", requests=(short, long))])
    assert next(runs).num_completed == 4
    num_calls = len(engine.calls)
    with pytest.raises(RequestError, match=r"a, request 2: the prompt \(1022 tokens\) plus max_tokens \(4\)"):
        next(runs)
    assert len(engine.calls) == num_calls
