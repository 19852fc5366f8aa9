"""Neither a flood nor a batch takes the places of others, and a call is taken whole or not at all."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import DeadlineExceeded, InvalidParameter, Overloaded, TargetUnreachable
from penstock.request import Targets, Tier
from tests.fakes.virtual_engine import H200_LLAMA_8B, VirtualEngine, request

DEFAULT_PLACES = 1024
# Places that are kept for tenants with nothing waiting: as long as fewer others flood, there is one for a newcomer.
KEPT_PLACES = DEFAULT_PLACES // 16


def make(**changes):
    options = {"known": H200_LLAMA_8B, "max_running": 8, "max_waiting": 64, **changes}
    return VirtualEngine(**options)


def call(engine, name, num_answers=1, **fields):
    """Send a call as a server does; return what became of its first request."""
    fields = {"prompt": 16, "answer": 16, **fields}
    taken = []
    for index in range(num_answers):
        terms = {}
        if num_answers > 1:
            terms = {"follows": f"{name}-0"} if index else {"call_prompts": [16], "call_answers": num_answers}
        outcome = engine.submit(request(f"{name}-{index}", engine.clock.now, **terms, **fields))
        taken.append(not outcome.refused)
    assert len(set(taken)) == 1, "a call is taken whole or not at all"
    return engine.outcomes[f"{name}-0"]


def flood(engine, tenant, num_answers=1, **fields):
    """Send calls until one is refused; return how it was."""
    for index in range(5000):
        outcome = call(engine, f"{tenant}-{index}", num_answers, tenant=tenant, **fields)
        if outcome.refused:
            return outcome.last
    raise AssertionError("the queue is not bounded")


@settings(max_examples=12, deadline=None)
@given(floods=st.lists(st.integers(1, 128), min_size=1, max_size=KEPT_PLACES - 1), steps=st.integers(0, 3))
def test_whatever_floods_another_tenant_finds_a_place_while_fewer_than_the_kept_places_flood(floods, steps):
    engine = make(max_running=4, max_waiting=DEFAULT_PLACES, num_tokens=40_000)
    for index, num_answers in enumerate(floods):
        flood(engine, f"flood{index}", num_answers)
        for _ in range(steps):
            engine.engine.step()
    assert not call(engine, "other", tenant="other").refused
    assert len(engine.scheduler.waiting) <= DEFAULT_PLACES


def test_the_flood_of_one_tenant_is_told_of_its_own_part_of_the_queue():
    engine = make(max_waiting=DEFAULT_PLACES)
    for index in range(8):
        assert not call(engine, f"row{index}", tenant="flood").refused
    engine.engine.step()
    refusal = flood(engine, "flood", 128)
    assert refusal.error_code == Overloaded.code
    waiting, part = map(int, re.findall(r"(\d+) (?:of your requests|places)", refusal.error))
    assert (waiting, part) == (640, 720)
    for index in range(5):
        assert not call(engine, f"other{index}", tenant="other", priority=10).refused


def test_a_tenants_retry_after_is_when_its_own_part_has_room():
    engine = make()
    refusal = flood(engine, "flood")
    start = engine.clock.now
    engine.run([], until=start + 0.5 * refusal.retry_after_seconds)
    assert call(engine, "too-soon", tenant="flood").refused
    engine.run([], until=start + 1.05 * refusal.retry_after_seconds)
    assert not call(engine, "in-time", tenant="flood").refused


@pytest.mark.parametrize("tenant", ["", "open"])
def test_without_keys_the_whole_queue_is_the_callers(tenant):
    engine = make()
    refusal = flood(engine, tenant)
    assert len(engine.scheduler.waiting) == 8 + 64
    assert "64 requests are waiting, and the queue has 64 places" in refusal.error


def test_a_tenant_may_take_all_rows_that_are_free():
    engine = make(max_waiting=0)
    assert not call(engine, "all", 8, tenant="one").refused
    assert call(engine, "more", tenant="one").refused


def test_a_call_that_never_fits_is_the_callers_mistake():
    engine = make()
    last = call(engine, "huge", 8 + 64, tenant="named").last
    assert last.error_code == InvalidParameter.code
    most = int(re.search(r"at most (\d+)", last.error)[1])
    assert not call(engine, "fits", most, tenant="named").refused


# ---------------------------------------------------------------- batches


def test_batches_take_no_place_and_no_row_of_online_requests():
    engine = make()
    for tenant in "abcd":
        flood(engine, tenant, 16, tier=Tier.BATCH)
    engine.engine.step()
    assert len(engine.scheduler.running) == 8
    online = [call(engine, f"online{index}", tenant=f"tenant{index}") for index in range(8 + 64)]
    assert not any(outcome.refused for outcome in online)
    assert call(engine, "one-more", tenant="last").refused


def test_online_requests_take_no_place_of_batches():
    engine = make()
    flood(engine, "")
    assert not call(engine, "line", 16, tier=Tier.BATCH).refused


def test_a_full_batch_tier_names_its_own_number():
    engine = make()
    refusal = flood(engine, "", tier=Tier.BATCH)
    assert "64 requests are waiting, and the queue has 64 places" in refusal.error


# ---------------------------------------------------------------- what is counted


@pytest.mark.parametrize("num_answers", [1, 16])
def test_a_refused_call_counts_once_whatever_it_was_refused_for(num_answers):
    engine = make()
    flood(engine, "", num_answers)
    hopeless = call(engine, "hopeless", num_answers, targets=Targets(time_per_token_seconds=1e-6))
    assert hopeless.last.error_code == TargetUnreachable.code
    assert call(engine, "late", num_answers, deadline_seconds=-1.0, best_effort=True).refused
    refused = engine.engine.stats().num_refused
    assert {reason: count for reason, count in refused.items() if count} == {
        "queue_full": 1,
        "unreachable": 1,
        "deadline": 1,
    }


def test_places_of_a_call_that_stopped_coming_are_free_again():
    engine = make(max_running=1, max_waiting=4)
    first = {"call_prompts": [1], "call_answers": 5}
    assert not engine.engine.submit(request("a-0", prompt=1, **first), b"gone")
    assert engine.engine.submit(request("b", prompt=1), b"other"), "all places are the call's"
    engine.engine.drop_client(b"gone")
    assert not engine.engine.submit(request("c", prompt=1), b"other")


def test_calls_whose_requests_come_in_turn_stay_apart():
    engine = make()
    terms = {
        "taken": {},
        "hopeless": {"targets": Targets(time_per_token_seconds=1e-6)},
        "late": {"deadline_seconds": -1.0, "best_effort": True},
    }
    for index in range(5):
        for name, own in terms.items():
            share = {"follows": f"{name}-0"} if index else {"call_prompts": [16], "call_answers": 5}
            engine.submit(request(f"{name}-{index}", prompt=16, answer=16, **own, **share))
        engine.submit(request(f"other-{index}", prompt=16, answer=16))

    def ends(name):
        return {
            None if (last := engine.outcomes[f"{name}-{index}"].last) is None else last.error_code for index in range(5)
        }

    assert [ends(name) for name in (*terms, "other")] == [
        {None},
        {TargetUnreachable.code},
        {DeadlineExceeded.code},
        {None},
    ]
    refused = engine.engine.stats().num_refused
    assert {reason: count for reason, count in refused.items() if count} == {"unreachable": 1, "deadline": 1}


def test_places_of_a_call_that_was_taken_back_are_free_again_though_its_first_answer_has_ended():
    engine = make(max_running=1, max_waiting=4)
    first = {"call_prompts": [1], "call_answers": 5}
    engine.submit(request("a-0", prompt=1, answer=1, **first))
    engine.run([])
    assert [call(engine, name).refused for name in "bc"] == [False, True], "four of five places are the call's"
    engine.engine.abort(b"", ["a-0"])
    assert not call(engine, "d").refused
