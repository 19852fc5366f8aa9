"""Tenants share a busy engine by their weights, whatever they send and whichever came first."""

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.block_hash import BlockHasher
from penstock.engine.cache.kv_cache import KvCache
from penstock.engine.engine import Engine
from penstock.engine.messages import Submit
from penstock.engine.metrics import EngineMetrics
from penstock.engine.own_requests import WARM_UP
from penstock.engine.scheduler.cost_model import CostModel, StepShape
from penstock.engine.scheduler.foresight import Foresight
from penstock.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from penstock.engine.scheduler.serving_pace import ServingPace
from penstock.engine.scheduler.step_times import StepTimes
from penstock.engine.scheduler.tenant_account import DRAWN_TOKEN_COST, PROMPT_TOKEN_COST
from penstock.engine.scheduler.waiting_queue import AGEING_SECONDS
from penstock.request import SamplingParams, Targets, Tier
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.virtual_engine import H200_LLAMA_8B, VirtualClock, VirtualEngine, percentile, request

VOCAB, BLOCK, CONTEXT = 97, 4, 64


def make_engine(*, max_running, max_step_tokens, num_blocks=2000, foresight=False, clock=time.monotonic):
    config = SchedulerConfig(
        max_running=max_running,
        max_step_tokens=max_step_tokens,
        max_waiting=1000,
        max_context_tokens=CONTEXT,
        vocab_size=VOCAB,
        eos_token_ids=(),
    )
    cache = KvCache(num_blocks, BlockHasher(b"key", BLOCK))
    looks_ahead = Foresight.make(max_step_tokens=max_step_tokens, clock=clock) if foresight else None
    scheduler = Scheduler(config, cache, EngineMetrics(), foresight=looks_ahead, clock=clock)
    return Engine(scheduler, FakeRunner(max_running, VOCAB, BLOCK))


def submit(name, tenant, prompt, answer, **terms):
    tokens = random.Random(name).choices(range(VOCAB), k=prompt)
    params = SamplingParams(max_tokens=answer, seed=1, ignore_eos=True)
    return Submit(request_id=name, prompt=tokens, params=params, arrival=0.0, tenant=tenant, **terms)


def service_of(plan, tenants):
    """What a step gave each tenant."""
    given = dict.fromkeys(set(tenants.values()), 0.0)
    for piece in plan.slices:
        prompt = piece.num_tokens if piece.num_tokens > 1 or not piece.num_samples else 0
        given[tenants[piece.request]] += PROMPT_TOKEN_COST * prompt + DRAWN_TOKEN_COST * min(1, piece.num_samples)
    return given


def waits(engine, tenant):
    return any(request.tenant == tenant for request in engine.scheduler.waiting)


SIZES = st.builds(
    lambda total, part: (1 + part % (total - 1), total - 1 - part % (total - 1)),
    st.integers(2, CONTEXT),
    st.integers(0),
)
MAXIMAL_REQUEST = PROMPT_TOKEN_COST * 1 + DRAWN_TOKEN_COST * (CONTEXT - 1)


@settings(max_examples=40, deadline=None)
@given(
    first=st.lists(SIZES, min_size=8, max_size=20),
    second=st.lists(SIZES, min_size=8, max_size=20),
    early=st.tuples(st.integers(0, 8), st.integers(0, 60)),
    second_comes_first=st.booleans(),
    late=st.integers(0, 20),
    weights=st.tuples(st.sampled_from([1.0, 2.0, 5.0]), st.sampled_from([1.0, 2.0, 5.0])),
    max_running=st.integers(1, 8),
    extra_budget=st.integers(0, 24),
    foresight=st.booleans(),
    scarce_memory=st.booleans(),
)
def test_while_two_tenants_wait_their_weighted_service_differs_by_less_than_one_maximal_request(
    first, second, early, second_comes_first, late, weights, max_running, extra_budget, foresight, scarce_memory
):
    engine = make_engine(
        max_running=max_running,
        max_step_tokens=max_running + extra_budget,
        foresight=foresight,
        num_blocks=40 if scarce_memory else 2000,
    )
    weight = dict(zip("ab", weights, strict=True))
    # What one of them got before anybody waited is nobody's loss.
    num_early, num_steps = early
    for index in range(min(num_early, max_running)):
        engine.submit(submit(f"early{index}", "a", 1, CONTEXT - 1, weight=weight["a"]))
    for _ in range(num_steps if num_early else 0):
        engine.step()
    backlogs = [
        [submit(f"{tenant}{index}", tenant, *size, weight=weight[tenant]) for index, size in enumerate(sizes)]
        for tenant, sizes in (("a", first), ("b", second))
    ]
    if second_comes_first:
        backlogs.reverse()
    for backlog, num_steps in zip(backlogs, (late, 0), strict=True):
        for each in backlog:
            engine.submit(each)
        for _ in range(num_steps):
            engine.step()
    tenants = {number: state.tenant for number, state in engine.scheduler.requests.items()}
    lead, leads = 0.0, []
    while waits(engine, "a") and waits(engine, "b"):
        num_plans = len(engine.runner.plans)
        engine.step()
        for plan in engine.runner.plans[num_plans:]:
            given = service_of(plan, tenants)
            lead += given.get("a", 0.0) / weight["a"] - given.get("b", 0.0) / weight["b"]
            leads.append(lead)
    # A request that was preempted three times keeps its blocks to its end, so others may wait for that as well.
    most = (2 if scarce_memory else 1) * MAXIMAL_REQUEST / min(weights)
    assert max(leads, default=0.0) - min(leads, default=0.0) <= most


# ---------------------------------------------------------------- in virtual time, on an H200


def ttfts_beside_a_flood(prompt):
    """(alone, beside another tenant's 400 requests): TTFTs of a tenant that asks now and then."""
    asked = [request(f"b{index}", 2.5 + 0.213 * index, prompt=prompt, answer=16, tenant="b") for index in range(40)]
    flood = [request(f"a{index}", 0.01 * index, tenant="a") for index in range(400)]
    runs = [VirtualEngine(known=H200_LLAMA_8B).run(load) for load in (asked, asked + flood)]
    return [[run[item.request_id].ttft for item in asked] for run in runs]


@pytest.mark.parametrize(("prompt", "part"), [(1024, 0.5), (2048, 0.95)])
def test_a_flood_leaves_another_tenants_first_token_within_1_3_times_its_solo_time(prompt, part):
    solo, flooded = ttfts_beside_a_flood(prompt)
    assert percentile(flooded, part) <= 1.3 * percentile(solo, part)


def test_a_flood_costs_a_short_request_a_step_and_a_tenth_at_most():
    engine = VirtualEngine(known=H200_LLAMA_8B)
    first = request("first", 2.0, prompt=100, answer=8, tenant="b")
    asked = [request(f"b{index}", 3.0 + 0.31 * index, prompt=100, answer=8, tenant="b") for index in range(20)]
    outcomes = engine.run([first, *asked, *(request(f"a{index}", 0.01 * index, tenant="a") for index in range(400))])
    decode = max(H200_LLAMA_8B.seconds(shape) for shape in engine.runner.shapes if not shape.prompt_tokens)
    # From its first request on the engine is shared, and steps take 1.75 times what decoding takes.
    assert max(outcomes[item.request_id].ttft for item in asked) <= 1.75 * decode * 1.1 + 2 * H200_LLAMA_8B.fixed


@pytest.mark.parametrize("prompt", [512, 1024])
def test_a_32k_prompt_leaves_short_requests_within_twice_their_idle_time(prompt):
    before = [request(f"w{index}", 0.05 * index, prompt=200 + 30 * index, answer=4) for index in range(60)]
    short = [request(f"s{index}", 4.0 + 0.061 * index, prompt=prompt, answer=4) for index in range(12)]
    idle = VirtualEngine(known=H200_LLAMA_8B).run([*before, *short])
    busy = VirtualEngine(known=H200_LLAMA_8B).run([*before, request("long", 3.95, prompt=32_768, answer=1), *short])
    assert busy["long"].ttft > 0.6, "the long prompt runs all the while"
    alone = percentile([idle[item.request_id].ttft for item in short], 0.95)
    assert percentile([busy[item.request_id].ttft for item in short], 0.95) <= 2 * alone


def test_short_requests_do_not_starve_a_long_prompt():
    stream = [request(f"s{index}", 0.018 * index, prompt=1024, answer=2) for index in range(500)]
    outcomes = VirtualEngine(known=H200_LLAMA_8B).run([request("long", 0.5, prompt=32_768, answer=1), *stream])
    assert outcomes["long"].ttft < 8.0
    assert outcomes["s499"].arrival > outcomes["long"].ttft + 0.5


def test_weights_divide_the_tokens_of_a_busy_engine():
    engine = VirtualEngine(known=H200_LLAMA_8B)
    rng = random.Random(3)
    load = [
        request(f"{tenant}{index}", 0.0, prompt=rng.randint(50, 2000), answer=rng.randint(10, 200), tenant=tenant,
                weight=weight)
        for tenant, weight in (("a", 1.0), ("b", 3.0))
        for index in range(300)
    ]  # fmt: skip
    outcomes = engine.run(load, until=4.0)
    drawn = {name: sum(len(o.token_times) for key, o in outcomes.items() if key[0] == name) for name in "ab"}
    assert 2.4 <= drawn["b"] / drawn["a"] <= 3.6


def test_a_tenant_that_was_away_has_nothing_saved_up():
    engine = VirtualEngine(known=H200_LLAMA_8B)
    early = [request("b-early", 0.0, tenant="b")]
    flood = [request(f"a{index}", 0.0, tenant="a") for index in range(400)]
    late = [request(f"b{index}", 5.0, tenant="b") for index in range(200)]
    outcomes = engine.run(early + flood + late, until=8.0)
    drawn = {
        name: sum(sum(t > 5.2 for t in o.token_times) for key, o in outcomes.items() if key[0] == name) for name in "ab"
    }
    assert 0.7 <= drawn["a"] / drawn["b"] <= 1.5


# ---------------------------------------------------------------- priorities and tiers


def test_a_higher_priority_takes_the_row_of_a_lower_one_which_goes_on_where_it_was():
    engine = make_engine(max_running=1, max_step_tokens=16)
    engine.submit(submit("low", "a", 10, 40))
    for _ in range(10):
        engine.step()
    engine.submit(submit("high", "a", 4, 4, priority=3))
    order = []
    while engine.has_work:
        order += [event.request_id for _, event in engine.step() if event.finish is not None]
    assert order == ["high", "low"]
    computed = sum(piece.num_tokens for plan in engine.runner.plans for piece in plan.slices)
    assert computed == 10 + 39 + 4 + 3, "nothing was computed twice"
    assert engine.metrics.num_preemptions == 0


def test_waiting_lifts_a_request_over_a_stream_of_better_ones():
    clock = VirtualClock()
    engine = make_engine(max_running=1, max_step_tokens=16, clock=clock)
    engine.submit(submit("low", "a", 4, 2, priority=0))
    finished, index = [], 0
    while "low" not in finished:
        if len(engine.scheduler.waiting) < 3:
            engine.submit(submit(f"high{index}", "b", 4, 2, priority=2))
            index += 1
        clock.now += 0.5
        finished += [event.request_id for _, event in engine.step() if event.finish is not None]
        assert clock.now < 3 * AGEING_SECONDS + 5.0
    assert clock.now > 2 * AGEING_SECONDS


def test_who_rose_by_waiting_takes_no_row_of_its_own_tenant():
    clock = VirtualClock()
    engine = make_engine(max_running=2, max_step_tokens=16, clock=clock)
    for index in range(6):
        engine.submit(submit(f"a{index}", "a", 4, 30))
    finished = []
    while engine.has_work:
        clock.now += 1.0
        finished += [event.request_id for _, event in engine.step() if event.finish is not None]
    assert finished == [f"a{index}" for index in range(6)]
    assert clock.now <= 3 * 31 + 2


def test_batch_requests_run_when_nobody_else_does_and_give_way_at_once():
    engine = make_engine(max_running=2, max_step_tokens=16)
    for index in range(4):
        engine.submit(submit(f"batch{index}", "a", 4, 30, tier=Tier.BATCH))
    for _ in range(6):
        engine.step()
    assert len(engine.scheduler.running) == 2
    for index in range(2):
        engine.submit(submit(f"online{index}", "b", 4, 3))
    finished = []
    while engine.has_work:
        finished += [event.request_id for _, event in engine.step() if event.finish is not None]
    assert finished[:2] == ["online0", "online1"]
    assert len(finished) == 6


def test_batch_work_lengthens_online_requests_time_per_token_by_less_than_a_tenth():
    rng, now, online = random.Random(5), 0.0, []
    for index in range(120):
        now += rng.expovariate(12)
        online.append(request(f"o{index}", now))
    batch = [request(f"b{index}", 0.0, tier=Tier.BATCH, tenant="b") for index in range(300)]
    without = VirtualEngine(known=H200_LLAMA_8B).run(online)
    with_batch = VirtualEngine(known=H200_LLAMA_8B).run(online + batch)
    alone, beside = (
        percentile([run[item.request_id].time_per_token for item in online], 0.99) for run in (without, with_batch)
    )
    assert beside <= 1.1 * alone
    drawn = sum(len(with_batch[item.request_id].token_times) for item in batch)
    assert drawn == 300 * 128, "all of it is done in the end"


def test_a_stream_of_new_tenants_pauses_a_row_for_a_quarter_of_a_second_at_most():
    engine = VirtualEngine(known=H200_LLAMA_8B)
    steady = [request(f"a{index}", 0.0, answer=400, tenant="a") for index in range(20)]
    newcomers = [request(f"n{index}", 1.0 + 0.02 * index, answer=1, tenant=f"t{index}") for index in range(300)]
    outcomes = engine.run(steady + newcomers)
    for item in steady:
        times = outcomes[item.request_id].token_times
        assert max(later - earlier for earlier, later in itertools.pairwise(times)) < 0.3


def test_a_promised_time_per_token_outlasts_another_tenants_claim_to_a_row():
    engine = VirtualEngine(known=H200_LLAMA_8B, max_running=8)
    targets = Targets(time_per_token_seconds=0.03)
    promised = [request(f"a{index}", 0.0, answer=300, tenant="a", targets=targets) for index in range(8)]
    outcomes = engine.run([*promised, *(request(f"b{index}", 0.5, answer=20, tenant="b") for index in range(8))])
    assert all(outcomes[item.request_id].time_per_token <= 0.03 for item in promised)
    assert not any(outcomes[f"b{index}"].refused for index in range(8))


def test_the_engines_own_requests_are_no_other_tenant():
    clock = VirtualClock()
    pace = ServingPace(StepTimes(CostModel(H200_LLAMA_8B), clock), 8192, clock)
    shape = StepShape(64, 64 * 1000)
    pace.note_arrival("a", 100)
    alone = pace.comfortable_seconds(shape)
    pace.note_arrival(WARM_UP, 100)
    pace.note_arrival("a", 100)
    assert pace.comfortable_seconds(shape) == alone
    pace.note_arrival("b", 100)
    assert pace.comfortable_seconds(shape) < alone


def test_small_steps_are_not_cut_further():
    clock = VirtualClock()
    pace = ServingPace(StepTimes(CostModel(), clock), 256, clock)
    assert pace.step_tokens([], []) == 256


def longest_step(count, **terms):
    """The most prompt tokens of a step while `count` requests of 1,024 tokens came at once."""
    engine = VirtualEngine(known=H200_LLAMA_8B)
    engine.run([request(f"{index}", 0.0, prompt=1024, answer=16, **terms) for index in range(count)])
    # The first step has nobody to wait for it.
    return max(shape.prompt_tokens for shape in engine.runner.shapes[1:])


def test_a_long_queue_makes_steps_longer_where_callers_have_no_names():
    assert longest_step(200) > 2 * longest_step(4)


@pytest.mark.parametrize("terms", [{"tenant": "a"}, {"targets": Targets(ttft_seconds=30.0)}])
def test_but_not_where_others_may_come_or_a_time_was_promised(terms):
    assert longest_step(200, **terms) < 1.5 * longest_step(4, **terms)


@pytest.mark.parametrize(
    "terms",
    [
        {"deadline_seconds": 600.0},
        {"deadline_seconds": 600.0, "best_effort": True},
        {"targets": Targets(ttft_seconds=30.0, time_per_token_seconds=1.0), "best_effort": True},
    ],
)
def test_a_deadline_and_what_best_effort_asks_for_make_no_step_shorter(terms):
    assert longest_step(200, **terms) == longest_step(200)


def test_a_promised_time_makes_steps_shorter_while_it_is_there_and_for_10_seconds():
    def longest_after(seconds, **terms):
        engine = VirtualEngine(known=H200_LLAMA_8B)
        engine.run([request("promised", 0.0, prompt=1024, answer=16, **terms)])
        first = len(engine.runner.shapes)
        engine.run([request(f"{index}", seconds, prompt=1024, answer=16) for index in range(200)])
        return max(shape.prompt_tokens for shape in engine.runner.shapes[first + 1 :])

    promised = {"targets": Targets(ttft_seconds=30.0)}
    assert longest_after(5.0, **promised) < longest_after(5.0)
    assert longest_after(15.0, **promised) == longest_after(15.0)


def test_who_was_refused_makes_no_step_shorter_for_long():
    def crowd(name, moment):
        return [request(f"{name}{index}", moment, prompt=1024, answer=16) for index in range(200)]

    engine = VirtualEngine(known=H200_LLAMA_8B)
    late = request("late", 0.001, prompt=1024, answer=16, targets=Targets(ttft_seconds=0.1))
    assert engine.run([*crowd("first", 0.0), late])["late"].refused
    first = len(engine.runner.shapes)
    engine.run(crowd("then", 100.0))
    assert max(shape.prompt_tokens for shape in engine.runner.shapes[first + 1 :]) == longest_step(200)


def test_who_has_got_more_but_asks_for_less_and_a_flood_do_not_take_a_row_from_each_other_again_and_again(monkeypatch):
    engine = VirtualEngine(known=H200_LLAMA_8B, max_running=8, max_context_tokens=131_072, num_tokens=200_000)
    placement, parked = engine.scheduler.placement, []
    park = placement.park
    monkeypatch.setattr(placement, "park", lambda request: (parked.append(request.request_id), park(request)))
    flood = [request(f"a{index}", 0.001 * index, prompt=64, answer=300, tenant="a") for index in range(24)]
    engine.run([*flood, request("b", 0.5, prompt=12_000, answer=200, tenant="b")])
    assert 1 <= len(parked) <= 3, "it takes a row once, and keeps it"
