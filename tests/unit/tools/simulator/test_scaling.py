"""A fleet that grows and shrinks in virtual time: by the gateway's own autoscaler, and by a schedule."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.commands.scaling import section_for
from penstock.config import gather
from penstock.engine.simulated.profile import read_profile
from penstock.tools.bench.shape import parse_shape
from penstock.tools.bench.summary import ServiceLevel
from penstock.tools.bench.trace import read_trace
from penstock.tools.bench.workload import Workload
from penstock.tools.simulator.oracle import find_oracle, schedule_for
from penstock.tools.simulator.scaling import AutoscaledSize, ScheduledSize, run_scaled
from penstock.tools.simulator.server import configure

TRACE = Path(__file__).parents[5] / "shared" / "data" / "azure_llm_2023_conv.csv"
LEVEL = ServiceLevel(ttft_ms=2000, time_per_token_ms=40)
START_SECONDS = 2.0


@pytest.fixture(scope="module")
def server():
    targets = {"target_ttft_ms": LEVEL.ttft_ms, "target_time_per_token_ms": LEVEL.time_per_token_ms}
    return configure(gather(targets), read_profile("h200-llama-8b"), policy="power-of-two")


def burst(*parts):
    """Requests of 2,048 tokens in and 8 out: (seconds, requests a second) one after the other."""
    requests, begin = [], 0.0
    for seconds, rate in parts:
        shape = parse_shape(f"{max(1, round(seconds * rate))}x2048+8", seed=len(requests))
        requests += [replace(item, start_seconds=begin + index / rate) for index, item in enumerate(shape.requests())]
        begin += seconds
    return Workload(name="burst", requests=tuple(requests))


LOAD = burst((4, 8), (7, 27), (6, 4))


@pytest.fixture(scope="module")
def autoscaled(server):
    """One replica does about 20 of these a second."""
    return run_scaled(
        "promises", server, LOAD, LEVEL, AutoscaledSize(section_for("promises", START_SECONDS)), START_SECONDS
    )


def test_a_fleet_grows_with_the_load_and_keeps_its_service_level(autoscaled):
    assert autoscaled.most_replicas >= 2
    assert autoscaled.attainment > 0.9


def test_it_shrinks_again_and_costs_less_than_its_largest_size(autoscaled):
    assert autoscaled.replica_seconds < 0.8 * autoscaled.most_replicas * 17


def test_the_oracle_keeps_the_level_at_no_more_than_the_autoscaler_pays(server, autoscaled):
    oracle = find_oracle(server, LOAD, LEVEL, autoscaled.work, start_seconds=START_SECONDS)
    assert oracle.run.attainment >= 0.99
    assert oracle.run.replica_seconds <= 1.05 * autoscaled.replica_seconds
    assert oracle.run.replica_seconds >= sum(autoscaled.work)


def test_a_scheduled_replica_is_ready_when_its_window_begins_and_its_start_is_paid_for(server):
    scaler = ScheduledSize((1, 2), 5.0, START_SECONDS)
    run = run_scaled("scheduled", server, burst((10, 5)), LEVEL, scaler, START_SECONDS)
    assert run.most_replicas == 2
    # One for ten seconds and an answer's time, another from two seconds before its window on.
    assert 10 + 5 + START_SECONDS - 0.6 <= run.replica_seconds <= 10 + 5 + START_SECONDS + 1.0


def test_a_window_has_as_many_replicas_as_its_work_needs():
    work = [0.5] * 5 + [2.3] * 5 + [0.9] * 5
    assert schedule_for(work, 0.9, start_seconds=1.0) == (1, 3, 1)


def test_a_dip_that_is_shorter_than_a_start_is_sat_out():
    work = [3.0] * 5 + [1.0] * 5 + [2.0] * 5 + [1.0] * 10
    assert schedule_for(work, 1.0, start_seconds=1.0) == (3, 1, 2, 1, 1)
    assert schedule_for(work, 1.0, start_seconds=6.0) == (3, 2, 2, 1, 1)


def simulate(*arguments):
    try:
        return main(["simulate", *arguments])
    except SystemExit as ended:
        return int(ended.code or 0)


def test_the_command_prints_a_line_for_each(capsys):
    arguments = ["--shape", "40x512+8", "--rate", "20", "--slo-ttft", "2000", "--autoscale", "promises,queue-length"]
    assert simulate(*arguments) == 0
    shown = capsys.readouterr().out
    assert "promises" in shown
    assert "queue-length" in shown
    assert "replica-s" in shown


@pytest.mark.parametrize("wrong", [["--autoscale", "fastest"], ["--autoscale", "oracle"]])
def test_a_policy_that_there_is_not_is_named(wrong, capsys):
    assert simulate("--shape", "4x512+8", "--slo-ttft", "2000", *wrong) == 2
    assert "queue-length" in capsys.readouterr().err


@pytest.mark.skipif(not TRACE.exists(), reason="the trace is not here")
def test_on_a_piece_of_azures_trace_99_percent_are_served_in_time(server):
    workload = read_trace(TRACE, 600).faster(6.0)
    run = run_scaled("promises", server, workload, LEVEL, AutoscaledSize(section_for("promises", 6.5)), 6.5)
    assert run.attainment >= 0.99
    assert 2 <= run.most_replicas <= 3
    assert run.replica_seconds < 2.5 * sum(run.work)


@pytest.mark.slow
@pytest.mark.skipif(not TRACE.exists(), reason="the trace is not here")
@pytest.mark.timeout(3600)
def test_on_azures_trace_99_percent_are_served_in_time_at_a_quarter_more_than_an_oracle_pays(capsys):
    arguments = ["--trace", str(TRACE), "--speed", "20", "--replicas", "4", "--policy", "power-of-two"]
    level = ["--slo-ttft", "2000", "--slo-tpot", "40", "--autoscale", "promises,oracle,queue-length"]
    assert simulate(*arguments, *level) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if "%" in line}
    assert float(rows["promises"][1].rstrip("%")) >= 99.0
    assert float(rows["promises"][3]) <= 1.25
