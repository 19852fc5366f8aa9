"""Workloads in virtual time: the figures that can be worked out by hand, and what must hold of the others."""

import statistics
from typing import Any

import msgspec
import pytest

from penstock.config import gather
from penstock.engine.simulated.profile import HostCost, Profile, read_profile
from penstock.tools.bench.catalogue import named_workload
from penstock.tools.bench.document import Run
from penstock.tools.bench.shape import parse_shape
from penstock.tools.bench.summary import ServiceLevel
from penstock.tools.bench.workload import FixedPrompt, PlannedRequest, Workload
from penstock.tools.simulator.server import configure
from penstock.tools.simulator.simulation import simulate, simulate_run
from tests.fakes.small_profile import small_profile

HOST = HostCost(decode_launch_ms=0, mixed_launch_ms=0, arrival_ms=3, delivery_ms=1)


def workload(shape: str, *, shared: int = 0) -> Workload:
    return Workload(name=shape, requests=parse_shape(shape, shared=shared).requests())


def run(load: Workload, profile: Profile | None = None, *, replicas: int = 1, **options: Any) -> Run:
    server = configure(gather(options, environ={}), profile or small_profile(), num_replicas=replicas)
    return simulate_run(server, load, ServiceLevel(ttft_ms=200))


def ttfts(found: Run) -> list[float | None]:
    return [row.ttft_ms for row in found.requests]


def test_a_request_alone_takes_what_the_profile_says():
    found = run(workload("1x100+5"), small_profile(host=HOST))
    # A prompt of 100 tokens at 1 ms, and before and after it the host; then 10 ms a token and the context's 0.1.
    assert found.ttft_ms is not None and found.time_per_token_ms is not None
    assert found.ttft_ms.p50 == pytest.approx(3 + 100 + 1)
    assert found.time_per_token_ms.p50 == pytest.approx(10.1, abs=0.02)


def test_a_request_that_comes_during_a_step_waits_for_it_and_for_the_one_launched_already():
    prompts = [FixedPrompt([index] * 100) for index in range(2)]
    requests = (PlannedRequest(prompts[0], 50), PlannedRequest(prompts[1], 5, start_seconds=0.105))
    found = run(Workload(name="two", requests=requests))
    # The first decode step runs from 100 to 110 ms, the next to 120: only then the second prompt, beside one token.
    assert ttfts(found) == pytest.approx([100, 120.2 + 101 - 105], abs=0.1)


def test_events_of_one_step_are_delivered_one_after_the_other():
    host = msgspec.structs.replace(HOST, event_ms=0.5)
    found = run(workload("4x10+2"), small_profile(host=host))
    assert ttfts(found) == pytest.approx([3 + 40 + 1 + 0.5 * index for index in range(4)])


def test_every_token_asked_for_comes_and_is_counted():
    found = run(workload("20x5-60+1-30").at_rate(5))
    planned = workload("20x5-60+1-30").requests
    assert found.num_completed == 20
    assert found.num_short == 0
    assert found.input_tokens == sum(item.prompt.num_tokens for item in planned)
    assert found.output_tokens == sum(item.max_tokens for item in planned)
    assert [row.output_tokens for row in found.requests] == [item.max_tokens for item in planned]


def test_the_same_work_gives_the_same_report():
    load = workload("30x20-80+10-20").at_rate(8)
    assert run(load) == run(load)
    assert run(load) != run(workload("30x20-80+10-20").at_rate(8, seed=1))


def test_answers_that_end_by_themselves_are_the_same_every_time_too():
    server = configure(gather({}, environ={}), small_profile(mean_answer_tokens=10))
    reports = [simulate(server, [workload("30x20+100")], ServiceLevel(), ignore_eos=False) for _ in range(2)]
    assert reports[0].runs == reports[1].runs
    assert reports[0].runs[0].num_short > 20


def test_a_tenth_of_the_time_is_a_tenth_of_every_figure():
    whole = run(workload("10x50+20").at_rate(2), small_profile(host=HOST))
    tenth = run(workload("10x50+20").at_rate(20), small_profile(host=HOST).scaled(0.1))
    assert tenth.seconds == pytest.approx(whole.seconds / 10)
    # Not each to the last digit: what the scheduler expects of steps begins with the same guess on both, and decides
    # whose prompt is cut.
    assert statistics.median(ttfts(tenth)) == pytest.approx(statistics.median(ttfts(whole)) / 10, rel=0.02)


def test_shared_beginnings_are_found_in_the_cache_and_save_time():
    load = workload("6x100+5", shared=80).at_rate(1)
    hit, missed = run(load), run(load, prefix_cache=False)
    assert hit.cached_tokens == 5 * 80
    assert not missed.cached_tokens
    first, *later = ttfts(hit)
    assert first == pytest.approx(100)
    assert later == pytest.approx([20] * 5, abs=1)


def test_a_full_queue_refuses_at_once():
    found = run(workload("20x50+10"), max_running=1, max_waiting=3)
    assert found.num_completed == 4
    assert found.errors == {"overloaded": 16}


def test_a_closed_loop_keeps_so_many_open():
    load = workload("6x20+10").in_closed_loop(2)
    found = run(load)
    sent = sorted(row.sent_seconds for row in found.requests)
    ends = sorted(row.sent_seconds + row.end_to_end_ms / 1e3 for row in found.requests)
    assert sent[:2] == [0, 0]
    assert sent[2:] == pytest.approx(ends[:4])


def test_replicas_share_the_load():
    load = workload("16x100+20")
    alone, together = run(load), run(load, replicas=4)
    assert together.num_completed == 16
    assert together.seconds < alone.seconds / 2


def test_goodput_is_judged_as_a_servers_is():
    found = run(workload("3x150+2").at_rate(0.1))
    assert found.goodput is not None
    assert found.goodput.num_requests == 3


@pytest.mark.parametrize("name", ["rate10", "rate30"])
def test_the_named_workloads_run_on_the_shipped_profile(name: str):
    profile = read_profile("h200-llama-8b")
    found = run(named_workload(name), profile, max_context_tokens=8192)
    assert found.num_completed == found.num_requests
    assert found.output_tokens == 128 * found.num_requests
    assert found.ttft_ms is not None and found.time_per_token_ms is not None
    # Neither faster than one prompt and one step alone, nor in a queue that grows.
    assert 20 < found.ttft_ms.p50 < 200
    assert 4 < found.time_per_token_ms.p50 < 30


def test_bursts_make_no_long_tail():
    found = run(named_workload("rate20"), read_profile("h200-llama-8b"), max_context_tokens=8192)
    assert found.ttft_ms is not None and found.time_per_token_ms is not None
    # Prompts cut into pieces throughout: 140 and 10.9.
    assert found.ttft_ms.p99 < 130
    assert found.time_per_token_ms.p99 < 12


def test_more_load_is_slower():
    profile = read_profile("h200-llama-8b")
    figures = [run(named_workload(name), profile).time_per_token_ms for name in ("rate10", "rate20", "rate30")]
    medians = [item.p50 for item in figures if item is not None]
    assert medians == sorted(medians)
    assert len(medians) == 3


def test_a_report_can_be_written_and_read_as_a_servers(tmp_path):
    from penstock.tools.bench.document import read_report, write_report

    server = configure(gather({}, environ={}), small_profile())
    report = simulate(server, [workload("3x20+4")], ServiceLevel())
    write_report(report, tmp_path / "report.json")
    assert read_report(tmp_path / "report.json") == report
    assert report.target == "1 × simulated Abacus"


def test_the_profile_decides_what_the_cache_holds():
    server = configure(gather({"kv_memory": "64KiB"}, environ={}), small_profile())
    assert server.config.num_blocks == 1 + 4
    larger = msgspec.structs.replace(small_profile(), kv_token_bytes=2048)
    assert configure(gather({"kv_memory": "64KiB"}, environ={}), larger).config.num_blocks == 1 + 2
