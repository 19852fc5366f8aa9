"""Limits, cooldowns, idleness and the warm pool, whatever a policy proposes; and whole fleets under random loads."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.fleet.autoscaler.controller import Controller
from penstock.fleet.autoscaler.policies.interface import Proposal, ScalePolicy
from penstock.fleet.autoscaler.policies.registry import SCALE_POLICIES
from tests.unit.fleet.autoscaler.looks import FluidFleet, look, section


class Scripted(ScalePolicy):
    """Proposes what it is told to."""

    def __init__(self, count=1):
        self.count = count

    def propose(self, signals):
        return Proposal(self.count, "it was told to")


def controller(count=1, **fields):
    policy = Scripted(count)
    return Controller(section(**fields), policy), policy


def test_a_proposal_is_kept_within_its_limits():
    made, _ = controller(count=50, min_replicas=2, max_replicas=7)
    assert made.decide(look(0.0)).desired == 7
    made, _ = controller(count=1, min_replicas=2, max_replicas=7)
    assert made.decide(look(0.0)).desired == 2


def test_more_are_wanted_at_once_and_fewer_only_when_they_were_enough_for_the_cooldown():
    made, policy = controller(count=2)
    assert made.decide(look(0.0)).desired == 2
    policy.count = 5
    assert made.decide(look(1.0)).desired == 5
    policy.count = 3
    assert [made.decide(look(moment)).desired for moment in (2.0, 11.0, 11.5)] == [5, 5, 3]


def test_what_is_found_at_the_start_stays_for_the_cooldown():
    made, _ = controller(count=1)
    assert [made.decide(look(moment, 6)).desired for moment in (0.0, 10.0, 10.5)] == [6, 6, 1]


def test_the_last_replica_goes_only_after_it_was_idle_long_enough():
    made, _ = controller(count=0, min_replicas=0)
    made.decide(look(0.0))
    idle = [made.decide(look(moment, num_requests=0.0)).desired for moment in (15.0, 19.9, 20.0)]
    assert idle == [1, 1, 0]
    assert made.decide(look(21.0, 0, num_requests=0.0)).desired == 0


def test_an_idle_fleet_sleeps_in_time_whatever_is_forecast_from_before():
    made, _ = controller(count=1, min_replicas=0, scale_down_seconds=60.0)
    made.decide(look(0.0))
    idle = [made.decide(look(moment, num_requests=0.0)) for moment in (19.9, 20.0)]
    assert [decision.desired for decision in idle] == [1, 0]
    assert idle[1].reason.endswith("nothing was asked for 20 s")
    assert made.decide(look(21.0, 0, num_requests=0.0)).desired == 0
    assert made.decide(look(22.0, 0, num_requests=0.0, num_held=1)).desired == 1


def test_a_fleet_whose_requests_end_before_anybody_looks_is_not_idle():
    made, _ = controller(count=1, min_replicas=0)
    looks = [look(10.0 * turn, num_requests=0.0, generated_tokens_per_second=turn % 2) for turn in range(12)]
    assert [made.decide(seen).desired for seen in looks] == [1] * 12


def test_a_request_that_is_held_wakes_a_fleet_of_none():
    made, _ = controller(count=0, min_replicas=0)
    assert made.decide(look(0.0, 0, num_requests=0.0)).desired == 0
    assert made.decide(look(1.0, 0, num_requests=0.0, num_held=1)).desired == 1


def test_without_zero_allowed_one_stays_however_idle():
    made, _ = controller(count=0)
    assert made.decide(look(1000.0, num_requests=0.0)).desired == 1


def test_warm_replicas_are_beside_those_that_are_wanted_and_within_the_limit():
    made, policy = controller(count=3, warm_replicas=2, max_replicas=6)
    decision = made.decide(look(0.0))
    assert (decision.desired, decision.warm, decision.total) == (3, 2, 5)
    policy.count = 5
    assert made.decide(look(1.0)).total == 6


def test_a_decision_says_what_was_proposed_and_why_it_is_not_that():
    made, _ = controller(count=9, max_replicas=4)
    decision = made.decide(look(0.0))
    assert decision.proposed == 9
    assert decision.reason == "it was told to; at most 4"


LOADS = st.lists(
    st.tuples(st.floats(0, 8), st.integers(1, 40)),  # (replicas' worth of work, for so many seconds)
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("policy", SCALE_POLICIES.names)
@given(loads=LOADS, least=st.integers(0, 2))
@settings(max_examples=40, deadline=None)
def test_under_any_load_limits_and_cooldowns_hold(policy, loads, least):
    fleet = FluidFleet(section(policy=policy, min_replicas=least, max_replicas=9, requests_per_replica=1))
    for load, seconds in loads:
        for _ in range(seconds):
            before = [decision.desired for decision in fleet.decisions[-10:]]
            decision = fleet.second(load)
            assert least <= decision.desired <= 9
            assert decision.desired >= (1 if load > 0.5 else 0)
            # Fewer than the most of the last seconds only where all of their proposals were below it.
            if before and decision.desired < max(before) and decision.desired > 0:
                recent = [item.proposed for item in fleet.decisions[-10:]]
                assert decision.desired >= max(recent)


@given(load=st.floats(0.3, 6.0), start=st.floats(1.0, 10.0), num_ready=st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_a_steady_load_settles_on_as_many_as_it_needs_and_stays(load, start, num_ready):
    fleet = FluidFleet(section(target_utilization=0.75), num_ready, start)
    for _ in range(150):
        fleet.second(load)
    settled = {decision.desired for decision in fleet.decisions[-30:]}
    needed = load / 0.75  # of which a hundredth of a replica is no reason for another
    assert settled in ({math.ceil(needed)}, {math.ceil(needed - 0.0101)})
    assert fleet.backlog < 0.01


@given(before=st.floats(0.1, 3.0), after=st.floats(0.1, 6.0))
@settings(max_examples=40, deadline=None)
def test_a_jump_of_load_is_worked_off_soon(before, after):
    fleet = FluidFleet(section(), math.ceil(before / 0.75))
    for _ in range(40):
        fleet.second(before)
    for _ in range(25):  # five times what a start takes
        fleet.second(after)
    assert fleet.backlog < 0.01


@given(loads=LOADS)
@settings(max_examples=30, deadline=None)
def test_a_fleet_goes_to_zero_when_all_is_done_and_comes_back(loads):
    fleet = FluidFleet(section(min_replicas=0))
    for load, seconds in loads:
        for _ in range(seconds):
            fleet.second(load)
    for _ in range(60 + math.ceil(fleet.backlog)):
        fleet.second(0.0)
    assert fleet.total == 0
    for _ in range(40):
        fleet.second(0.5)
    assert fleet.ready == 1
    assert fleet.backlog < 0.01
