"""A scripted server in virtual time: what was scripted is what is reported."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.errors import RemoteError
from penstock.tools.bench.document import Report, Run
from penstock.tools.bench.request_body import Dialect
from penstock.tools.bench.selection import sweep
from penstock.tools.bench.serve_bench import ServeTarget, bench_serve
from penstock.tools.bench.shape import parse_shape
from penstock.tools.bench.summary import ServiceLevel
from penstock.tools.bench.tables import warnings
from penstock.tools.bench.watcher import Watcher
from penstock.tools.bench.workload import Workload
from tests.unit.tools.bench.stream_server import Script, served
from tests.unit.tools.bench.virtual_time import run_virtually


def workload(shape: str = "4x8+11") -> Workload:
    return Workload(name="load", requests=parse_shape(shape).requests())


def bench(
    script: Script,
    *workloads: Workload,
    dialect: Dialect | None = None,
    level: ServiceLevel | None = None,
    warm_up: int = 0,
    watcher: Watcher | None = None,
    cancel_after_seconds: float | None = None,
    **target: Any,
) -> Report:
    async def main(now: Callable[[], float]) -> Report:
        async with served(script) as url:
            chosen = ServeTarget(url=url, dialect=dialect or Dialect(), warm_up_requests=warm_up, **target)
            bench = bench_serve(chosen, workloads, level or ServiceLevel(), watcher=watcher, now=now)
            task = asyncio.create_task(bench)
            if cancel_after_seconds is not None:
                asyncio.get_running_loop().call_later(cancel_after_seconds, task.cancel)
            return await task

    return run_virtually(main)


def bench_one(script: Script, load: Workload | None = None, **options: Any) -> Run:
    (run,) = bench(script, load or workload(), **options).runs
    return run


def measured_requests(script: Script) -> list[dict[str, Any]]:
    return [body for body in script.requests if body["max_tokens"] > 1]


def test_the_scripted_times_are_the_reported_ones() -> None:
    run = bench_one(Script(first_seconds=0.05, token_seconds=0.01))
    assert run.ttft_ms is not None
    assert run.time_per_token_ms is not None
    assert run.inter_token_ms is not None
    assert run.end_to_end_ms is not None
    assert run.ttft_ms.p50 == pytest.approx(50)
    assert run.ttft_ms.p99 == pytest.approx(50)
    assert run.time_per_token_ms.mean == pytest.approx(10)
    assert run.inter_token_ms.count == 40
    assert run.inter_token_ms.p95 == pytest.approx(10)
    assert run.end_to_end_ms.max == pytest.approx(150)
    assert run.seconds == pytest.approx(0.15)
    assert run.requests_per_second == pytest.approx(4 / 0.15)
    assert run.output_tokens_per_second == pytest.approx(44 / 0.15)
    assert run.input_tokens == 32


def test_several_tokens_in_an_event_count_by_usage() -> None:
    run = bench_one(Script(tokens_per_event=2, token_seconds=0.01), workload("1x8+10"))
    assert run.counted_by == "usage"
    assert run.output_tokens == 10
    assert run.time_per_token_ms is not None
    assert run.time_per_token_ms.mean == pytest.approx(80 / 9)


def test_without_usage_events_are_counted_and_the_report_says_so() -> None:
    run = bench_one(Script(usage=False))
    assert run.counted_by == "chunks"
    assert run.output_tokens == 44
    assert run.input_tokens == 32


def test_a_chat_is_timed_from_its_first_text_not_its_role() -> None:
    script = Script()
    run = bench_one(script, dialect=Dialect(chat=True))
    assert run.inter_token_ms is not None
    assert run.inter_token_ms.count == 40
    assert len(measured_requests(script)[0]["messages"][0]["content"].split()) == 8


def test_token_ids_are_sent_where_the_server_takes_them() -> None:
    script = Script()
    load = workload()
    report = bench(script, load)
    assert report.prompts == "token ids"
    assert [body["prompt"] for body in measured_requests(script)] == [
        list(request.prompt.token_ids()) for request in load.requests
    ]
    assert all(body["ignore_eos"] and body["stream"] for body in measured_requests(script))


def test_text_is_sent_where_token_ids_are_refused() -> None:
    script = Script(takes_token_ids=False)
    report = bench(script, workload())
    assert report.prompts == "text"
    assert len(measured_requests(script)[-1]["prompt"].split()) == 8


@pytest.mark.parametrize("refused", [("ignore_eos",), ("ignore_eos", "stream_options")])
def test_fields_that_the_server_refuses_are_left_out(refused: tuple[str, ...]) -> None:
    script = Script(refuses=refused)
    report = bench(script, workload())
    assert not report.ignored_end_of_text
    assert report.runs[0].num_completed == 4
    assert report.runs[0].counted_by == ("chunks" if "stream_options" in refused else "usage")


def test_the_key_and_the_model_are_sent() -> None:
    script = Script()
    report = bench(script, workload(), api_key="secret", model="other")
    assert report.model == "other"
    assert {body["model"] for body in script.requests} == {"other"}
    assert set(script.keys) == {"Bearer secret"}


def test_the_first_served_model_is_the_default() -> None:
    assert bench(Script(), workload()).model == "scripted"


def test_a_closed_loop_keeps_so_many_open() -> None:
    script = Script()
    run = bench_one(script, workload("6x8+11").in_closed_loop(2))
    assert script.max_open == 2
    assert run.seconds == pytest.approx(3 * 0.15)


def test_requests_leave_at_their_times() -> None:
    load = workload("5x8+2").at_rate(2.0)
    run = bench_one(Script(), load)
    assert [row.sent_seconds for row in run.requests] == pytest.approx([item.start_seconds for item in load.requests])
    assert run.rate == 2.0


def test_a_sweep_runs_each_rate_with_tokens_of_its_own() -> None:
    script = Script()
    report = bench(script, *sweep(workload("3x8+2"), [1.0, 4.0]))
    assert [(run.label, run.rate) for run in report.runs] == [("load @ 1/s", 1.0), ("load @ 4/s", 4.0)]
    prompts = [tuple(body["prompt"]) for body in measured_requests(script)]
    assert len(set(prompts)) == 6


def test_the_warm_up_is_not_measured_and_shares_no_tokens() -> None:
    script = Script()
    run = bench_one(script, workload("3x8+2"), warm_up=2)
    assert run.num_requests == 3
    bodies = measured_requests(script)
    assert len(bodies) == 5
    assert len({tuple(body["prompt"]) for body in bodies}) == 5


def test_goodput_counts_requests_within_every_limit() -> None:
    run = bench_one(Script(), level=ServiceLevel(ttft_ms=51, time_per_token_ms=11))
    assert run.goodput is not None
    assert run.goodput.num_requests == 4
    assert run.goodput.requests_per_second == pytest.approx(4 / 0.15)
    slow = bench_one(Script(token_seconds=0.02), level=ServiceLevel(ttft_ms=51, time_per_token_ms=11))
    assert slow.goodput is not None
    assert slow.goodput.num_requests == 0
    assert slow.num_completed == 4


class Listener(Watcher):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def waiting(self, sentence: str) -> None:
        self.heard.append(sentence)


def test_a_server_that_says_nothing_is_told_of_every_ten_seconds() -> None:
    listener = Listener()
    run = bench_one(Script(first_seconds=35), workload("2x8+2"), watcher=listener)
    assert run.num_completed == 2
    remarks = [sentence.split(", while ") for sentence in listener.heard]
    assert [said.split(" has said nothing for ")[1] for said, _ in remarks] == ["10 s", "20 s", "30 s"] * 2
    assert [rest.split(" open")[0] for _, rest in remarks] == ["a request is"] * 3 + ["2 requests are"] * 3


def test_a_server_that_is_slow_and_not_silent_is_not_told_of() -> None:
    listener = Listener()
    bench_one(Script(first_seconds=5, token_seconds=5), workload("1x8+10"), watcher=listener)
    assert listener.heard == []


def test_what_is_cut_short_reports_what_ended_and_how_much_did_not() -> None:
    loads = workload("4x8+11").in_closed_loop(1), workload()
    report = bench(
        Script(first_seconds=0.9), *loads, cancel_after_seconds=3.5
    )  # the probe takes 0.9 s, each answer one
    (run,) = report.runs
    assert report.cut_short
    assert (run.num_completed, run.num_unfinished, run.num_requests) == (2, 2, 4)
    assert run.seconds == pytest.approx(2.6)
    assert warnings(run) == ["Cut short: 2 of 4 requests had not ended."]


def test_a_warm_up_that_is_cut_short_leaves_the_runs_before_it() -> None:
    script = Script(first_seconds=0.9)
    report = bench(script, workload("1x8+11"), workload("1x8+11"), warm_up=1, cancel_after_seconds=3.5)
    assert report.cut_short
    assert [(run.num_completed, run.num_unfinished) for run in report.runs] == [(1, 0)]


def test_cached_tokens_are_reported() -> None:
    assert bench_one(Script(cached_tokens=3)).cached_tokens == 12


def test_a_refusal_is_counted_by_its_status() -> None:
    run = bench_one(Script(status=429))
    assert run.errors == {"http 429": 4}
    assert run.error_examples == {"http 429": "too many"}
    assert run.num_completed == 0
    assert run.ttft_ms is None


@pytest.mark.parametrize("refusal", [b"[" * 60_000, b"\xff", b""])
def test_a_refusal_that_cannot_be_read_is_counted_too(refusal: bytes) -> None:
    assert bench_one(Script(status=500, refusal=refusal)).errors == {"http 500": 4}


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (Script(cut_after=3), "cut"),
        (Script(end_after=3), "cut"),
        (Script(error_after=3), "error event"),
    ],
)
def test_an_answer_that_breaks_off_is_an_error_of_its_kind(script: Script, kind: str) -> None:
    run = bench_one(script)
    assert run.errors == {kind: 4}
    assert run.output_tokens == 0


def test_a_server_that_does_not_stream_is_refused() -> None:
    with pytest.raises(RemoteError, match="not a stream"):
        bench(Script(content_type="application/json"), workload())


def test_nobody_there_is_one_sentence() -> None:
    async def main(now: Callable[[], float]) -> Report:
        async with served(Script()) as url:
            gone = url
        return await bench_serve(ServeTarget(url=gone), _loads(), ServiceLevel(), now=now)

    with pytest.raises(RemoteError, match="no server answers at http://127"):
        run_virtually(main)


def test_a_server_that_goes_away_leaves_connect_errors() -> None:
    from penstock.tools.bench.client import StreamClient
    from penstock.tools.bench.load import LoadResult, run_load
    from penstock.tools.bench.serve_bench import HttpSender

    async def main(now: Callable[[], float]) -> LoadResult:
        async with served(Script()) as url:
            gone = url
        async with StreamClient(gone, now=now) as client:
            return await run_load(workload(), HttpSender(client, workload(), Dialect(), "m"), now=now)

    result = run_virtually(main)
    assert [item.error for _, item in result.measured] == ["connect"] * 4


def test_a_server_without_completions_may_have_the_chat_api() -> None:
    script = Script(status=404, refuses_probe=True)
    with pytest.raises(RemoteError, match=r"http 404: too many.*or give --chat where"):
        bench_one(script)
    with pytest.raises(RemoteError, match=r"check --url and --model$"):
        bench_one(script, dialect=Dialect(chat=True))


def test_a_server_that_is_starting_is_waited_for_with_its_own_words() -> None:
    script = Script(status=503, refuses_probe=True, refusal=b'{"error": {"message": "the engine is starting"}}')
    with pytest.raises(RemoteError, match=r"is not ready; wait until it is \(http 503: the engine is starting\)"):
        bench_one(script)


def test_a_key_that_no_header_can_hold_is_refused() -> None:
    async def main(now: Callable[[], float]) -> Report:
        target = ServeTarget(url="http://127.0.0.1:9", api_key="one\ntwo")
        return await bench_serve(target, _loads(), ServiceLevel(), now=now)

    with pytest.raises(RemoteError, match="check --api-key"):
        run_virtually(main)


@pytest.mark.parametrize("url", ["localhost:8000", "http://[::1", "http://", "http://a:b", "http://a:99999"])
def test_what_is_not_a_url_is_refused(url: str) -> None:
    async def main(now: Callable[[], float]) -> Report:
        return await bench_serve(ServeTarget(url=url), _loads(), ServiceLevel(), now=now)

    with pytest.raises(RemoteError, match="is not a URL"):
        run_virtually(main)


def _loads() -> Sequence[Workload]:
    return [workload()]
