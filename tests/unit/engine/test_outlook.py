"""Whoever is refused and waits as told is let in, whoever else is there; and is in time."""

import random
import re

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.own_requests import WARM_UP
from penstock.errors import Overloaded
from penstock.request import FinishReason, Targets, Tier
from tests.fakes.virtual_engine import VirtualEngine, request

WARM_UP_TOKENS = (4096, 2048, 1024, 512, 256, 128, 64, 16)


def warmed_engine(max_running, num_tokens=400_000):
    """An engine that has learnt what its steps cost, as a server's has before it is ready."""
    engine = VirtualEngine(max_running=max_running, num_tokens=num_tokens)
    for length in WARM_UP_TOKENS:
        load = [
            request(f"{length}-{index}", engine.clock.now, prompt=length, answer=6 + index, tenant=WARM_UP)
            for index in range(4)
        ]
        engine.run(load)
    engine.clock.now += 0.01
    return engine


def tenant(rng, name):
    """Who asks: its name, weight, priority and tier."""
    return {
        "tenant": name,
        "weight": rng.choice([0.5, 1.0, 1.0, 2.0, 5.0]),
        "priority": rng.choice([-2, 0, 0, 3]),
        "tier": Tier.BATCH if rng.random() < 0.25 else Tier.ONLINE,
    }


def load_of(rng, tenants, num_requests, start, span):
    """Requests of these tenants, some with promises of their own."""
    longest, most = rng.choice([64, 512, 2000, 8000]), rng.choice([1, 16, 64, 128])
    for index in range(num_requests):
        who = rng.choice(tenants)
        terms = {}
        if who["tier"] is Tier.ONLINE and rng.random() < 0.3:
            targets = Targets(rng.choice([None, 0.2, 1.0]), rng.choice([None, 0.03]))
            terms = {"targets": targets, "best_effort": rng.random() < 0.5}
        sizes = {"prompt": rng.randint(1, longest), "answer": rng.randint(1, most)}
        yield request(f"{index}", start + rng.random() * span, **sizes, **who, **terms)


def terms_of(reason, slack, prompt):
    """What to ask for: `slack` times what an idle engine needs for the prompt and 32 tokens."""
    first = 0.006 + 19e-6 * prompt
    if reason == "ttft":
        return {"targets": Targets(ttft_seconds=slack * first / 0.85)}
    if reason == "time_per_token":
        return {"targets": Targets(time_per_token_seconds=min(slack, 1.5) * 0.0042 / 0.93)}
    return {"deadline_seconds": slack * (first + 32 * 0.0042) / 0.93}


@settings(max_examples=100, deadline=None)
@given(
    reason=st.sampled_from(["ttft", "ttft", "time_per_token", "deadline"]),
    seed=st.integers(0, 2**32),
    num_tenants=st.integers(1, 4),
    num_requests=st.integers(15, 120),
    max_running=st.sampled_from([2, 8, 64, 256]),
    span=st.sampled_from([0.0, 0.3, 2.0]),
    prompt=st.sampled_from([16, 256, 1024, 4000]),
    slack=st.sampled_from([1.25, 1.5, 2.0, 4.0, 10.0]),
    is_new=st.booleans(),
    on_its_way=st.sampled_from([0.0, 0.0, 0.3, 2.0]),
)
def test_whoever_waits_as_told_is_let_in_and_in_time_whoever_else_is_there(
    reason, seed, num_tenants, num_requests, max_running, span, prompt, slack, is_new, on_its_way
):
    rng = random.Random(seed)
    engine = warmed_engine(max_running)
    tenants = [tenant(rng, f"tenant{index}") for index in range(num_tenants)]
    start = engine.clock.now
    begun = start + rng.choice([0.1, 0.5, 1.0]) * max(span, 1.0)
    load = [item for item in load_of(rng, tenants, num_requests, start, span) if item.arrival <= begun]
    engine.run(load, until=begun)
    engine.clock.now = max(engine.clock.now, begun)
    who = tenant(rng, "new") if is_new else rng.choice(tenants)
    terms = {**who, "tier": Tier.ONLINE, **terms_of(reason, slack, prompt)}

    def ask(name, arrival):
        return engine.submit(request(name, arrival, prompt=prompt, answer=32, **terms))

    before = engine.engine.stats().num_refused[reason]
    first = ask("first", engine.clock.now - on_its_way).last
    if first is None or first.error_code != Overloaded.code:
        return
    assert engine.engine.stats().num_refused[reason] == before + 1
    told = engine.clock.now + first.retry_after_seconds
    engine.run([], until=told)
    engine.clock.now = max(engine.clock.now, told)
    second = ask("second", engine.clock.now)
    assert engine.engine.stats().num_refused[reason] == before + 1
    if not second.refused:
        engine.run([])
        assert second.last.finish is FinishReason.LENGTH
        assert reason != "ttft" or second.ttft <= terms["targets"].ttft_seconds


def test_what_a_flooding_tenant_has_under_way_is_no_reason_to_refuse_another():
    engine = warmed_engine(64)
    start = engine.clock.now
    engine.run([request(f"{index}", start, prompt=6000, tenant="flood") for index in range(40)], until=start + 1.0)
    asked = request("asked", engine.clock.now, prompt=512, answer=8, tenant="new", targets=Targets(ttft_seconds=0.06))
    outcome = engine.submit(asked)
    engine.run([], until=engine.clock.now + 1.0)
    assert not outcome.refused and outcome.ttft <= 0.06


def test_who_was_too_long_on_its_way_may_come_again_at_once_whoever_floods():
    engine = warmed_engine(64)
    start = engine.clock.now
    engine.run([request(f"{index}", start, prompt=1000, tenant="flood") for index in range(400)], until=start + 1.0)

    def ask(name, arrival):
        return engine.submit(request(name, arrival, prompt=500, tenant="new", targets=Targets(ttft_seconds=0.5)))

    refused = ask("late", engine.clock.now - 0.7).last
    assert refused.error.startswith("the request was 700 ms on its way to the engine")
    assert refused.retry_after_seconds < 0.1
    engine.run([], until=engine.clock.now + refused.retry_after_seconds)
    again = ask("again", engine.clock.now)
    engine.run([], until=engine.clock.now + 1.0)
    assert not again.refused and again.ttft <= 0.5


def test_the_time_that_a_refusal_names_is_when_the_first_token_would_come():
    engine = warmed_engine(64)
    start = engine.clock.now
    flood = [request(f"{index}", start, prompt=1000, answer=100) for index in range(600)]
    engine.run(flood, until=start + 1.0)
    now = engine.clock.now
    refused = engine.submit(request("asked", now, prompt=500, answer=5, targets=Targets(ttft_seconds=1.0))).last
    told = float(re.search(r"would come after ([0-9]+) ms", refused.error)[1]) / 1000
    late = engine.submit(
        request("late", now, prompt=500, answer=5, targets=Targets(ttft_seconds=1.0), best_effort=True)
    )
    engine.run([])
    assert late.ttft <= told <= 1.3 * late.ttft


def test_rows_of_batch_work_are_no_reason_to_refuse_an_online_request():
    engine = warmed_engine(256)
    start = engine.clock.now
    batch = [request(f"{index}", start, prompt=500, answer=2000, tier=Tier.BATCH) for index in range(240)]
    engine.run(batch, until=start + 6.0)
    alone = warmed_engine(256)
    outcomes = []
    for one in (alone, engine):
        asked = request("asked", one.clock.now, prompt=1024, answer=8, targets=Targets(ttft_seconds=0.05))
        outcomes.append(one.submit(asked))
        one.run([], until=one.clock.now + 0.5)
    assert all(not outcome.refused and outcome.ttft <= 0.05 for outcome in outcomes)


def test_a_prompt_that_has_its_row_waits_for_no_other():
    engine = warmed_engine(2)
    start = engine.clock.now
    engine.run([request("long", start, prompt=4000, answer=500)], until=start + 0.02)
    asked = request("asked", engine.clock.now, prompt=64, answer=8, targets=Targets(ttft_seconds=0.2))
    assert not engine.submit(asked).refused


def test_two_tenants_whose_prompts_take_turns_are_not_promised_the_whole_device():
    engine = warmed_engine(2)
    start = engine.clock.now
    flood = [request(f"{index}", start, prompt=900, answer=1, tenant="flood") for index in range(40)]
    engine.run(flood, until=start + 0.1)
    asked = request("asked", engine.clock.now, prompt=4000, answer=8, tenant="new", targets=Targets(ttft_seconds=0.12))
    first = engine.submit(asked)
    engine.run([], until=engine.clock.now + 1.0)
    assert first.refused or first.ttft <= 0.12
    generous = msgspec.structs.replace(asked, request_id="generous", targets=Targets(ttft_seconds=0.3))
    assert not engine.submit(msgspec.structs.replace(generous, arrival=engine.clock.now)).refused
