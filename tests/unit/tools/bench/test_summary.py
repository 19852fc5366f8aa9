"""Percentiles, per-request figures and what is counted."""

from array import array

import pytest

from penstock.tools.bench.client import Measurement
from penstock.tools.bench.document import RequestRow, Run
from penstock.tools.bench.summary import ServiceLevel, distribution, summarise
from penstock.tools.bench.workload import FixedPrompt, PlannedRequest, Workload


def measured(
    sent: float, times: list[float], output_tokens: int | None = None, error: str | None = None
) -> Measurement:
    ended = times[-1] if times else sent
    return Measurement(sent, ended, array("d", times), error=error, output_tokens=output_tokens)


def summary_of(*items: Measurement, max_tokens: int = 3) -> Run:
    request = PlannedRequest(FixedPrompt((1, 2, 3, 4)), max_tokens)
    workload = Workload(name="w", requests=(request,) * len(items))
    return summarise(workload, [(request, item) for item in items], ServiceLevel())


def test_percentiles_lie_between_neighbours() -> None:
    made = distribution([float(value) for value in range(101)][::-1])
    assert made is not None
    assert (made.count, made.mean, made.p50, made.p90, made.p95, made.p99, made.max) == (101, 50, 50, 90, 95, 99, 100)
    halves = distribution([1.0, 2.0])
    assert halves is not None
    assert halves.p50 == 1.5


def test_nothing_has_no_distribution() -> None:
    assert distribution([]) is None


def test_the_run_lasts_from_the_first_sent_to_the_last_ended() -> None:
    run = summary_of(measured(10.0, [10.5, 11.0, 11.5]), measured(11.0, [12.0, 12.5, 14.0]))
    assert run.seconds == 4.0
    assert run.requests_per_second == 0.5
    assert run.output_tokens_per_second == 1.5
    assert run.input_tokens_per_second == 2.0


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    run = summary_of(measured(0.0, [0.5]), max_tokens=1)
    assert run.ttft_ms is not None
    assert run.time_per_token_ms is None
    assert run.inter_token_ms is None


def test_failed_requests_count_as_errors_and_nothing_else() -> None:
    failed = measured(0.0, [0.1, 0.2], error="cut")
    run = summary_of(measured(0.0, [1.0, 2.0, 3.0]), failed, failed)
    assert (run.num_requests, run.num_completed, run.errors) == (3, 1, {"cut": 2})
    assert run.output_tokens == 3
    assert run.ttft_ms is not None
    assert run.ttft_ms.count == 1


@pytest.mark.parametrize(
    ("counts", "counted_by"), [([3, 3], "usage"), ([None, None], "chunks"), ([3, None], "usage and chunks")]
)
def test_the_report_says_what_counted_the_tokens(counts: list[int | None], counted_by: str) -> None:
    run = summary_of(*(measured(0.0, [1.0, 2.0, 3.0], count) for count in counts))
    assert run.counted_by == counted_by
    assert run.output_tokens == 6


def test_answers_shorter_than_asked_for_are_counted() -> None:
    assert summary_of(measured(0.0, [1.0, 2.0]), measured(0.0, [1.0, 2.0, 3.0])).num_short == 1


@pytest.mark.parametrize(
    ("ttft_ms", "time_per_token_ms", "kept"),
    [(100.0, 10.0, True), (101.0, 10.0, False), (100.0, 11.0, False), (None, 10.0, False), (100.0, None, True)],
)
def test_a_service_level_is_kept_where_every_limit_is(
    ttft_ms: float | None, time_per_token_ms: float | None, kept: bool
) -> None:
    row = RequestRow(0.0, ttft_ms, time_per_token_ms, 1.0, 1, 1)
    assert ServiceLevel(ttft_ms=100.0, time_per_token_ms=10.0).is_kept(row) is kept


def test_no_requests_make_a_run_of_nothing() -> None:
    run = summary_of()
    assert (run.num_requests, run.seconds, run.requests_per_second) == (0, 0.0, 0.0)
