"""However many are refused, and however much runs, the engine's host works so much for each step at most."""

import random
import sys
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.scheduler import lookout
from penstock.engine.scheduler.outlook import Outlook
from penstock.errors import Overloaded
from penstock.request import Targets
from tests.fakes.virtual_engine import H200_LLAMA_8B, VirtualEngine, request
from tests.unit.engine.test_outlook import load_of, tenant, warmed_engine


def loaded_engine(num_requests):
    """Half of the requests run, half wait."""
    rng = random.Random(num_requests)
    num_rows = num_requests // 2
    engine = VirtualEngine(known=H200_LLAMA_8B, max_running=num_rows, max_waiting=10_000, num_tokens=4_000_000)
    sizes = [(rng.randint(64, 1024), rng.randint(64, 512)) for _ in range(num_requests)]
    names = [f"tenant{index % 4}" for index in range(num_requests)]
    load = [
        request(f"{index}", 0.0, prompt=prompt, answer=answer, tenant=name)
        for index, ((prompt, answer), name) in enumerate(zip(sizes, names, strict=True))
    ]
    engine.run(load, until=0.5 + 0.01 * num_rows)
    return engine


def hopeless(engine, count, rng):
    """Requests that cannot be in time, no two of them alike."""
    for index in range(count):
        targets = Targets(ttft_seconds=rng.uniform(0.1, 0.2))
        prompt, name = rng.randint(512, 2048), f"tenant{rng.randrange(4)}"
        yield request(
            f"hopeless {engine.clock.now} {index}", engine.clock.now, prompt=prompt, tenant=name, targets=targets
        )


@pytest.fixture
def followed(monkeypatch):
    """How many requests each outlook followed that was made."""
    made, begin = [], Outlook.__init__

    def note(outlook, *args, **kwargs):
        begin(outlook, *args, **kwargs)
        made.append(outlook.num_followed)

    monkeypatch.setattr(Outlook, "__init__", note)
    return made


def count_calls(action):
    """How many Python functions an action calls: its work, whatever the machine does beside it."""
    count = 0

    def note(_frame, event, _argument):
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(before)
    return count


def test_all_that_are_refused_before_the_next_step_share_one_outlook(followed):
    engine = loaded_engine(400)
    outcomes = [engine.submit(submit) for submit in hopeless(engine, 100, random.Random(1))]
    assert all(outcome.refused and outcome.last.error_code == Overloaded.code for outcome in outcomes)
    assert followed == [len(engine.engine.scheduler.requests)]


@pytest.mark.parametrize("num_requests", [100, 600])
def test_only_so_many_requests_are_followed_for_each_step_whoever_comes(followed, num_requests):
    engine, rng, num_steps = loaded_engine(num_requests), random.Random(2), 12
    for _ in range(num_steps):
        for index, submit in enumerate(hopeless(engine, 10, rng)):
            assert engine.submit(submit).refused
            # Another load each time: every outlook is out of date at once.
            engine.submit(request(f"taken {engine.clock.now} {index}", engine.clock.now, prompt=16, answer=16))
        engine.run([], until=engine.clock.now + 1e-6)
    assert len(followed) > 1
    assert sum(followed) <= (num_steps + 1) * lookout.FOLLOWED_A_STEP + max(followed)


def test_after_many_different_demands_of_one_tenant_others_are_still_told_their_own_time():
    told = []
    for num_before in (0, 100):
        engine = loaded_engine(400)
        for index in range(num_before):
            targets = Targets(ttft_seconds=0.1 + index / 1000)
            assert engine.submit(request(f"{index}", engine.clock.now, tenant="tenant0", targets=targets)).refused
        asked = request("asked", engine.clock.now, prompt=2048, tenant="tenant1", targets=Targets(ttft_seconds=0.15))
        told.append(engine.submit(asked).last.retry_after_seconds)
    assert told[0] == told[1]


def test_who_asks_for_less_than_another_is_told_no_later_a_time_once_many_have_been():
    engine = loaded_engine(400)
    terms = {"tenant": "tenant0", "targets": Targets(ttft_seconds=0.3)}
    crowd = [
        engine.submit(request(f"{prompt}", engine.clock.now, prompt=prompt, **terms))
        for prompt in (*range(1600, 1620), 1500, 4000)
    ]
    told = [outcome.last.retry_after_seconds for outcome in crowd]
    assert told[-2] <= told[0] < told[-1], "the last one asks for more than any before it, and waits for all to end"


def test_a_refusal_takes_hardly_more_where_much_more_is_under_way():
    def work_of_200(engine):
        first, *others = hopeless(engine, 201, random.Random(3))
        engine.submit(first)
        outcomes = []
        work = count_calls(lambda: outcomes.extend([engine.submit(submit) for submit in others]))
        assert all(outcome.refused for outcome in outcomes)
        return work

    assert work_of_200(loaded_engine(600)) < 1.5 * work_of_200(loaded_engine(100))


def test_a_crowd_that_asks_for_one_thing_costs_no_more_than_one_that_is_let_in():
    engine = loaded_engine(400)
    now = engine.clock.now
    targets = Targets(ttft_seconds=0.1)
    alike = [request(f"alike {index}", now, tenant="tenant0", targets=targets) for index in range(101)]
    open_ones = [request(f"open {index}", now, tenant="tenant0") for index in range(100)]
    assert engine.submit(alike[0]).refused
    refused = count_calls(lambda: [engine.submit(submit) for submit in alike[1:]])
    taken = count_calls(lambda: [engine.submit(submit) for submit in open_ones])
    assert refused < 2 * taken


@mock.patch.object(lookout, "FOLLOWED_A_STEP", 1)
@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_tenants=st.integers(1, 3),
    num_requests=st.integers(30, 90),
    max_running=st.sampled_from([2, 8, 64]),
    num_hopeless=st.sampled_from([3, 90]),
    num_taken=st.integers(0, 12),
    num_steps=st.integers(0, 4),
    slack=st.sampled_from([1.25, 2.0, 4.0, 10.0]),
)
def test_whoever_waits_as_told_by_an_outlook_that_is_out_of_date_is_let_in_and_in_time(
    seed, num_tenants, num_requests, max_running, num_hopeless, num_taken, num_steps, slack
):
    rng = random.Random(seed)
    engine = warmed_engine(max_running)
    tenants = [tenant(rng, f"tenant{index}") for index in range(num_tenants)]
    engine.run(load_of(rng, tenants, num_requests, engine.clock.now, 0.0), until=engine.clock.now + rng.random())
    for submit in hopeless(engine, num_hopeless, rng):
        engine.submit(submit)
    # The load changes and goes on, and what may be followed is spent.
    for index in range(num_taken):
        sizes = {"prompt": rng.randint(1, 2000), "answer": rng.randint(1, 64)}
        engine.submit(request(f"taken {index}", engine.clock.now, **sizes, **rng.choice(tenants)))
    for _ in range(num_steps):
        engine.run([], until=engine.clock.now + 1e-6)

    def ask(name):
        targets = Targets(ttft_seconds=slack * (0.006 + 19e-6 * 512) / 0.85)
        return engine.submit(request(name, engine.clock.now, prompt=512, answer=8, tenant="new", targets=targets))

    first = ask("first")
    if not first.refused or first.last.error_code != Overloaded.code:
        return
    if first.last.retry_after_seconds > 10.0:
        return  # steps of one tenant's batch may have become longer by then: docs/scheduling.md
    told = engine.clock.now + first.last.retry_after_seconds
    engine.run([], until=told)
    engine.clock.now = max(engine.clock.now, told)
    second = ask("second")
    assert not second.refused
    engine.run([])
    assert second.ttft <= slack * (0.006 + 19e-6 * 512) / 0.85
