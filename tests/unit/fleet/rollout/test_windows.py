"""Times by windows: what slows both versions counts against neither, and what slows one counts."""

import pytest

from penstock.fleet.rollout.course import Status
from penstock.fleet.rollout.evidence import Evidence
from penstock.fleet.rollout.trial import Trial
from penstock.fleet.rollout.windows import Windows
from tests.unit.fleet.rollout.shared_machine import VirtualRollout

SECONDS = 5.0
STEPS = ("shadow", 100.0), (50.0, 100.0)


def answer(ended_at, ttft, **fields):
    return Trial("", began_at=ended_at - ttft, first_at=ended_at, ended_at=ended_at, **fields)


def feed(*answers):
    """Have windows take (moment, time to the first token, whether it is the candidate's) of each."""
    evidence = Evidence()
    windows = Windows(evidence, SECONDS)
    for moment, ttft, is_candidate in answers:
        windows.add(answer(moment, ttft), is_candidate=is_candidate)
    return evidence


def test_answers_of_one_window_tell_one_ratio_when_it_is_over():
    answers = [(0.0, 1.0, False), (1.0, 2.0, True), (2.0, 1.0, False), (3.0, 2.0, True)]
    assert feed(*answers).ttft_ratio.num_values == 0
    ratio = feed(*answers, (SECONDS, 1.0, False)).ttft_ratio
    assert ratio.num_values == 1
    assert ratio.quantile(0.5) == pytest.approx(2.0, rel=0.02)


def test_a_window_goes_on_until_both_versions_have_answered_in_it():
    answers = [(0.0, 1.0, False), (2 * SECONDS, 1.0, False), (3 * SECONDS, 1.0, True)]
    assert feed(*answers).ttft_ratio.num_values == 0
    assert feed(*answers, (3 * SECONDS + 1, 1.0, False)).ttft_ratio.num_values == 1


def test_a_tail_is_told_only_of_windows_with_enough_answers_of_both():
    few = [(place, 1.0, is_candidate) for place in range(4) for is_candidate in (False, True)]
    many = [(place / 2, 1.0, is_candidate) for place in range(8) for is_candidate in (False, True)]
    assert feed(*few, (SECONDS, 1.0, False)).ttft_tail_ratio.num_values == 0
    assert feed(*many, (SECONDS, 1.0, False)).ttft_tail_ratio.num_values == 1


def test_what_slows_both_for_a_while_is_seen_in_neither():
    slowness = {0: 1.0, 1: 9.0, 2: 1.0, 3: 4.0}
    answers = [
        (SECONDS * window + part, 0.1 * slow, is_candidate)
        for window, slow in slowness.items()
        for part, is_candidate in ((0.0, False), (1.0, True))
    ]
    ratio = feed(*answers, (4 * SECONDS, 0.1, False)).ttft_ratio
    assert ratio.num_values == 4
    assert ratio.edges(1)[0] == pytest.approx(1.0, rel=0.02) and ratio.edges(4)[1] == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("fields", [{"has_failed": True}, {"was_hindered": True}])
def test_answers_whose_times_say_nothing_are_left_out(fields):
    evidence = Evidence()
    windows = Windows(evidence, SECONDS)
    windows.add(answer(0.0, 1.0), is_candidate=False)
    windows.add(answer(1.0, 1.0, **fields), is_candidate=True)
    windows.add(answer(SECONDS, 1.0), is_candidate=False)
    assert evidence.ttft_ratio.num_values == 0


RUNS = [12, pytest.param(100, marks=pytest.mark.slow)]
BURSTS = 0.5, 0.95


def virtual_runs(count, *, slowness, bursts):
    """Half of them in the shadow step, and half with half of the requests for each version."""
    return [
        VirtualRollout(seed, slowness=slowness, steps=STEPS[seed % 2], burst=bursts[seed // 2 % len(bursts)])
        for seed in range(count)
    ]


@pytest.mark.parametrize("num_runs", RUNS)
def test_identical_versions_on_a_busy_machine_are_hardly_ever_rolled_back(num_runs):
    """At most one in a hundred, however slow its spells are, and also where callers come in crowds."""
    runs = virtual_runs(num_runs, slowness=1.0, bursts=BURSTS)
    assert sum(run.run(1500).status is Status.ROLLED_BACK for run in runs) <= num_runs // 100


@pytest.mark.parametrize("num_runs", RUNS)
def test_a_version_that_takes_half_as_long_again_is_rolled_back_however_the_machine_does(num_runs):
    """At least 95 in a hundred."""
    runs = virtual_runs(num_runs, slowness=1.5, bursts=BURSTS[:1])
    assert sum(run.run(6000).status is Status.ROLLED_BACK for run in runs) >= 0.95 * num_runs


@pytest.mark.parametrize("num_runs", [5, pytest.param(25, marks=pytest.mark.slow)])
def test_where_callers_come_in_crowds_a_slow_version_is_caught_when_it_answers_them(num_runs):
    runs = [VirtualRollout(seed, slowness=1.5, steps=STEPS[1], burst=BURSTS[1]) for seed in range(num_runs)]
    assert all(run.run(6000).status is Status.ROLLED_BACK for run in runs)
