"""When requests leave, and whether the generator notices that it does not keep up."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from penstock.tools.bench.client import Measurement
from penstock.tools.bench.generator_health import judge
from penstock.tools.bench.load import LoadResult, run_load
from penstock.tools.bench.shape import parse_shape
from penstock.tools.bench.summary import ServiceLevel, summarise
from penstock.tools.bench.tables import warnings
from penstock.tools.bench.workload import PlannedRequest, Workload
from tests.unit.tools.bench.virtual_time import VirtualLoop, run_virtually


@dataclass
class FakeSender:
    """Answers after a while; preparing a body may keep the loop busy."""

    now: Callable[[], float]
    answer_seconds: float = 0.0
    busy_seconds: float = 0.0
    sent: list[float] = field(default_factory=list)

    def prepare(self, request: PlannedRequest) -> bytes:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.block(self.busy_seconds)
        return b"body"

    async def send(self, body: bytes) -> Measurement:
        sent = self.now()
        self.sent.append(sent)
        await asyncio.sleep(self.answer_seconds)
        return Measurement(sent=sent, ended=self.now())


def run(
    workload: Workload, *, answer_seconds: float = 1.0, busy_seconds: float = 0.0
) -> tuple[LoadResult, list[float]]:
    async def main(now: Callable[[], float]) -> tuple[LoadResult, list[float]]:
        sender = FakeSender(now, answer_seconds, busy_seconds)
        started = now()
        result = await run_load(workload, sender, now=now)
        return result, [moment - started for moment in sender.sent]

    return run_virtually(main)


def workload(shape: str = "10x4+2") -> Workload:
    return Workload(name="load", requests=parse_shape(shape).requests())


def test_all_at_once_is_at_once() -> None:
    _, sent = run(workload())
    assert sent == [0.0] * 10


def test_poisson_arrivals_keep_their_times_however_slow_the_answers() -> None:
    timed = workload().at_rate(50.0)
    _, sent = run(timed, answer_seconds=100.0)
    assert sent == pytest.approx([request.start_seconds for request in timed.requests])


def test_a_closed_loop_sends_when_an_answer_ended() -> None:
    _, sent = run(workload("6x4+2").in_closed_loop(3), answer_seconds=1.0)
    assert sent == pytest.approx([0, 0, 0, 1, 1, 1])


def test_every_request_is_measured_and_told_of() -> None:
    done: list[int] = []

    async def main(now: Callable[[], float]) -> LoadResult:
        return await run_load(workload(), FakeSender(now), on_done=lambda: done.append(1), now=now)

    assert len(run_virtually(main).measured) == len(done) == 10


@pytest.mark.parametrize(
    "load", [workload("6x4+2").at_rate(1.0), workload("6x4+2").in_closed_loop(2)], ids=["open", "closed"]
)
def test_a_load_that_is_cancelled_gives_what_it_has(load: Workload) -> None:
    async def main(now: Callable[[], float]) -> LoadResult:
        task = asyncio.create_task(run_load(load, FakeSender(now, answer_seconds=1.0), now=now))
        await asyncio.sleep(2.5)
        task.cancel()
        return await task

    result = run_virtually(main)
    assert 0 < len(result.measured) < 6
    assert all(item.ended <= item.sent + 1.0 for _, item in result.measured)
    assert result.cut_after_seconds == pytest.approx(2.5)


def test_a_generator_that_keeps_up_has_no_lag() -> None:
    result, _ = run(workload().at_rate(50.0))
    assert result.generator.loop_lag_p99_ms == pytest.approx(0, abs=1e-6)
    assert result.generator.late_send_p99_ms == pytest.approx(0, abs=1e-6)


def test_a_generator_that_is_the_bottleneck_says_so() -> None:
    slow = workload("20x4+2").at_rate(50.0)
    result, sent = run(slow, busy_seconds=0.1)
    assert len(sent) == 20
    assert result.generator.late_send_p99_ms > 1000
    assert result.generator.loop_lag_p99_ms > 80
    summary = summarise(slow, result.measured, ServiceLevel(), result.generator)
    assert "The load generator may be the bottleneck" in warnings(summary)[0]


def test_all_at_once_cannot_be_late() -> None:
    result, _ = run(workload(), busy_seconds=0.1)
    assert result.generator.late_send_p99_ms == 0.0


@pytest.mark.parametrize(
    ("lag_ms", "late_ms", "cpu_share", "words"),
    [
        (1.0, 1.0, 0.5, []),
        (11.0, 1.0, 0.5, ["event loop"]),
        (1.0, 21.0, 0.5, ["requests left"]),
        (1.0, 1.0, 0.95, ["CPU core"]),
        (11.0, 21.0, 0.95, ["event loop", "requests left", "CPU core"]),
    ],
)
def test_each_figure_has_its_own_warning(lag_ms: float, late_ms: float, cpu_share: float, words: list[str]) -> None:
    health = judge(lag_ms=lag_ms, max_lag_ms=lag_ms, late_ms=late_ms, cpu_share=cpu_share)
    assert len(health.warnings) == len(words)
    for word, warning in zip(words, health.warnings, strict=True):
        assert word in warning


def test_arrivals_keep_the_rate_they_name() -> None:
    for seed in range(5):
        starts = [request.start_seconds for request in workload("300x4+2").at_rate(30.0, seed).requests]
        assert starts[0] == 0.0 and starts == sorted(starts)
        assert 9.7 < starts[-1] < 10.0
        gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
        assert max(gaps) > 4 / 30  # still random
