"""A rollout's course: step by step up to everything, or back to where it was."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import RequestError
from penstock.fleet.rollout.course import Status, abort, go_on, stable_of, start
from penstock.fleet.rollout.evidence import Evidence
from penstock.fleet.rollout.plan import GateSection, RolloutSection
from tests.unit.fleet.rollout.simulated_traffic import Traffic

SECTION = RolloutSection(gate=GateSection(min_step_seconds=60, max_step_seconds=3600))


def begun(section=SECTION, before=None):
    return start("tiny", "b", section, before, now=0.0)


def run(rollout, candidate, *, seed=0, batch=50, seconds=20.0, most=400):
    """Send traffic to a candidate of this nature until its rollout has ended; return every state."""
    now, traffic = rollout.began_at, Traffic(seed)
    states = [rollout]
    for _ in range(most):
        now += seconds
        if rollout.is_shadowing:
            evidence = traffic.pairs(batch, **candidate)
        else:
            split = {name: value for name, value in candidate.items() if name != "divergence"}
            evidence = traffic.split(batch * 10, percent=rollout.candidate_percent, **split)
        following = go_on(rollout, evidence, now)
        if following.epoch != rollout.epoch:
            seed += 1
            traffic = Traffic(seed)
        rollout = following
        states.append(rollout)
        if not rollout.is_running:
            break
    return states


def test_a_healthy_candidate_is_promoted_step_by_step():
    states = run(begun(), {})
    percents = [state.candidate_percent for state in states]
    assert states[-1].status is Status.PROMOTED
    assert states[-1].stable_now == "b"
    assert percents == sorted(percents)
    assert [report.step for report in states[-1].history] == ["shadow", 5.0, 25.0, 50.0]
    assert all(report.outcome == "passed" for report in states[-1].history)


@pytest.mark.parametrize(
    ("candidate", "measure"),
    [({"slowness": 2.0}, "ttft"), ({"divergence": 0.9}, "tokens that differ"), ({"error_rate": 0.3}, "error rate")],
)
def test_a_candidate_that_is_worse_is_rolled_back_before_any_caller_sees_it(candidate, measure):
    last = run(begun(), candidate)[-1]
    assert last.status is Status.ROLLED_BACK
    assert (last.stable_now, last.candidate_percent) == ("stable", 0.0)
    assert measure in last.reason
    assert [report.step for report in last.history] == ["shadow"]


def test_what_only_load_shows_is_rolled_back_at_a_small_share():
    section = msgspec.structs.replace(SECTION, steps=(5.0, 50.0, 100.0))
    last = run(begun(section), {"slowness": 2.0})[-1]
    assert last.status is Status.ROLLED_BACK
    assert [report.step for report in last.history] == [5.0]


def test_a_step_lasts_as_long_as_it_must_even_when_all_is_clear():
    evidence = Traffic().pairs(2000)
    early = go_on(begun(), evidence, 30.0)
    assert early.is_shadowing and early.has_passed
    assert go_on(early, evidence, 60.0).step == 5.0


def test_with_the_limits_that_stand_by_default_a_step_without_errors_needs_512_requests_to_the_candidate():
    traffic, rollout = Traffic(), begun()
    needed = []
    while not rollout.has_passed:
        evidence = traffic.pairs(rollout.next_look - traffic.evidence.candidate.requests)
        needed.append(evidence.candidate.requests)
        rollout = go_on(rollout, evidence, 1.0)
    assert needed == [16, 32, 64, 128, 256, 512]


def test_bad_news_do_not_wait():
    evidence = Traffic().pairs(30, error_rate=1.0)
    assert go_on(begun(), evidence, 1.0).status is Status.ROLLED_BACK


def test_what_is_not_shown_to_be_good_in_time_is_rolled_back():
    last = go_on(begun(), Evidence(), 3600.0)
    assert last.status is Status.ROLLED_BACK
    assert "not shown" in last.reason


def test_nothing_new_changes_nothing():
    rollout = begun()
    assert go_on(rollout, Evidence(), 10.0) is rollout
    ended = abort(rollout, 10.0)
    assert go_on(ended, Evidence(), 1e9) is ended


def test_an_aborted_rollout_leaves_everything_to_the_stable_version():
    ended = abort(begun(), 10.0)
    assert (ended.status, ended.stable_now, ended.candidate_percent) == (Status.ABORTED, "stable", 0.0)
    with pytest.raises(RequestError, match="has ended"):
        abort(ended, 11.0)


def test_the_next_rollout_begins_from_what_was_promoted():
    promoted = run(begun(), {})[-1]
    following = start("tiny", "c", SECTION, promoted, now=1e6)
    assert following.stable == "b"
    assert following.epoch > promoted.epoch
    with pytest.raises(RequestError, match="already"):
        start("tiny", "b", SECTION, promoted, now=1e6)


def test_two_rollouts_of_one_model_do_not_run_at_once():
    with pytest.raises(RequestError, match="abort it first"):
        begun(before=begun())


def test_a_rollout_survives_being_written_down():
    for state in run(begun(), {"slowness": 2.0}):
        assert msgspec.json.decode(msgspec.json.encode(state), type=type(state)) == state


CANDIDATES = st.fixed_dictionaries(
    {
        "slowness": st.sampled_from([0.5, 1.0, 1.2, 2.0]),
        "error_rate": st.sampled_from([0.0, 0.01, 0.2]),
        "divergence": st.sampled_from([0.0, 0.01, 0.5]),
    }
)


@settings(deadline=None, max_examples=30)
@given(CANDIDATES, st.integers(0, 1000), st.integers(1, 60), st.floats(1.0, 600.0))
def test_any_traffic_ends_with_a_decision_and_never_lets_a_share_fall_before_it(candidate, seed, batch, seconds):
    states = run(begun(), candidate, seed=seed, batch=batch, seconds=seconds, most=40)
    running = [state.candidate_percent for state in states if state.is_running]
    assert running == sorted(running)
    epochs = [state.epoch for state in states]
    assert epochs == sorted(epochs)
    last = states[-1]
    if last.status is Status.PROMOTED:
        assert len(last.history) == 4
        assert candidate["slowness"] < 2 and candidate["error_rate"] < 0.2 and candidate["divergence"] < 0.5
    if not last.is_running:
        assert last.reason


def test_a_file_that_names_another_stable_version_afterwards_is_heeded_and_one_that_stayed_as_it_was_is_not():
    file = msgspec.structs.replace(SECTION, stable="v1")
    second = run(begun(file), {})[-1]
    third = abort(start("tiny", "v3", file, second, now=1e6), 1e6)
    for name, stable in (("v1", "b"), ("b", "b"), ("v3", "b"), ("v4", "v4")):
        assert stable_of(msgspec.structs.replace(SECTION, stable=name), third) == stable
    assert stable_of(RolloutSection(stable="v4"), start("tiny", "v3", file, second, now=1e6)) == "b"  # it runs
