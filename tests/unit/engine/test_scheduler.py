"""The scheduler over random schedules: the same tokens always, every block back, one end per request."""

import dataclasses
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.block_hash import BlockHasher
from penstock.engine.cache.host_tier import HostTier
from penstock.engine.cache.kv_cache import KvCache
from penstock.engine.engine import Engine
from penstock.engine.messages import Submit, TokenEvent
from penstock.engine.metrics import EngineMetrics
from penstock.engine.scheduler.foresight import Foresight
from penstock.engine.scheduler.placement import MAX_PREEMPTIONS
from penstock.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from penstock.engine.speculative.ngram import NgramDrafter
from penstock.errors import ContextTooLong, InvalidParameter, Overloaded
from penstock.request import FinishReason, SamplingParams, Tier
from tests.fakes.fake_runner import FakeRunner, expected_tokens

VOCAB = 97
EOS = 13
BLOCK = 4


def make_engine(
    *,
    num_blocks=33,
    max_running=4,
    max_step_tokens=16,
    max_waiting=100,
    max_context=64,
    host_slots=0,
    drafts=0,
    share_prefixes=True,
    vocab_size=VOCAB,
    expected_output=64.0,
    foresight=False,
):
    cache = KvCache(
        num_blocks,
        BlockHasher(b"key", BLOCK),
        host_tier=HostTier(host_slots) if host_slots else None,
        share_prefixes=share_prefixes,
    )
    config = SchedulerConfig(
        max_running=max_running,
        max_step_tokens=max_step_tokens,
        max_waiting=max_waiting,
        max_context_tokens=max_context,
        vocab_size=vocab_size,
        eos_token_ids=(EOS,),
        draft_tokens=drafts,
        expected_output_tokens=expected_output,
    )
    scheduler = Scheduler(
        config,
        cache,
        EngineMetrics(),
        drafter=NgramDrafter() if drafts else None,
        foresight=Foresight.make(max_step_tokens=max_step_tokens, clock=time.monotonic) if foresight else None,
    )
    return Engine(scheduler, FakeRunner(max_running, vocab_size, BLOCK))


def submit(name, prompt, *, seed=1, terms=None, **params):
    params.setdefault("max_tokens", 8)
    sampling = SamplingParams(seed=seed, **params)
    return Submit(request_id=name, prompt=prompt, params=sampling, arrival=0.0, **(terms or {}))


def drain(engine, limit=5000):
    """Step until nothing is left; return each request's events."""
    events: dict[str, list[TokenEvent]] = {}
    steps = 0
    while engine.has_work:
        for _, event in engine.step():
            events.setdefault(event.request_id, []).append(event)
        steps += 1
        assert steps < limit, "the scheduler makes no progress"
    return events


def tokens_of(events):
    return [token for event in events for token in event.token_ids]


def reference(prompt, seed, max_tokens, max_context=64, vocab_size=VOCAB):
    tokens = expected_tokens(prompt, seed, vocab_size, min(max_tokens, max_context - len(prompt)))
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


def assert_clean(engine):
    scheduler = engine.scheduler
    assert not scheduler.requests
    assert not scheduler.running
    assert len(scheduler.waiting) == 0
    pool = scheduler.cache.pool
    assert pool.num_held == 0
    taken = [pool.take()[0] for _ in range(pool.num_free)]
    assert sorted(taken) == list(range(1, pool.num_blocks + 1))
    for block in taken:
        pool.release(block)
    placement = scheduler.placement
    assert placement.firmly_promised == placement.loosely_promised == 0
    assert not placement.parked
    assert placement.parked.num_of_tier(0) == placement.parked.num_of_tier(1) == 0
    assert not engine._numbers


requests = st.lists(
    st.tuples(
        st.integers(0, 3),  # which shared beginning
        st.integers(0, 24),  # how much of it
        st.integers(1, 12),  # own tokens
        st.integers(1, 20),  # max_tokens
        st.integers(0, 12),  # steps to wait before the next one comes
        st.booleans(),  # whether it is aborted half-way
        st.fixed_dictionaries(
            {
                "tenant": st.sampled_from("ab"),
                "weight": st.sampled_from([0.5, 1.0, 4.0]),
                "priority": st.sampled_from([0, 0, 0, 1]),
                "tier": st.sampled_from([Tier.ONLINE, Tier.ONLINE, Tier.BATCH]),
            }
        ),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(
    requests=requests,
    num_blocks=st.integers(17, 48),
    max_running=st.integers(1, 8),
    extra_budget=st.integers(0, 24),
    host_slots=st.sampled_from([0, 1, 5]),
    drafts=st.sampled_from([0, 3]),
    small_vocab=st.booleans(),
    expected_output=st.sampled_from([0.0, 4.0, 64.0]),
    foresight=st.booleans(),
)
def test_every_schedule_gives_the_same_tokens_and_returns_every_block(
    requests, num_blocks, max_running, extra_budget, host_slots, drafts, small_vocab, expected_output, foresight
):
    vocab = 17 if small_vocab else VOCAB
    engine = make_engine(
        num_blocks=num_blocks,
        max_running=max_running,
        max_step_tokens=max_running + extra_budget,
        host_slots=host_slots,
        drafts=drafts,
        vocab_size=vocab,
        expected_output=expected_output,
        foresight=foresight,
    )
    wanted, events, aborted = {}, {}, set()

    def run(steps):
        for _ in range(steps):
            for _, event in engine.step():
                events.setdefault(event.request_id, []).append(event)

    for index, (family, shared, own, max_tokens, wait, abort, terms) in enumerate(requests):
        prompt = [(family * 31 + i) % vocab for i in range(shared)] + [(index * 7 + i) % vocab for i in range(own)]
        name = f"r{index}"
        assert engine.submit(submit(name, prompt, seed=index, terms=terms, max_tokens=max_tokens)) == []
        wanted[name] = reference(prompt, index, max_tokens, vocab_size=vocab)
        run(wait)
        if abort:
            aborted.add(name)
            for _, event in engine.abort(b"", [name]):
                events.setdefault(event.request_id, []).append(event)
    for name, more in drain(engine).items():
        events.setdefault(name, []).extend(more)
    for name, tokens in wanted.items():
        got = tokens_of(events[name])
        assert got == tokens[: len(got)]
        assert [event.finish is not None for event in events[name]] == [False] * (len(events[name]) - 1) + [True]
        if name not in aborted:
            assert got == tokens
    assert_clean(engine)


def test_a_request_ends_by_length_and_says_so():
    engine = make_engine(vocab_size=1000)
    engine.submit(submit("a", [1, 2, 3], max_tokens=5, ignore_eos=True))
    events = drain(engine)["a"]
    assert tokens_of(events) == expected_tokens([1, 2, 3], 1, 1000, 5)
    assert events[-1].finish is FinishReason.LENGTH


def test_a_stop_token_ends_a_request_and_is_named():
    expected = expected_tokens([1, 2, 3], 1, VOCAB, 8)
    engine = make_engine()
    engine.submit(submit("a", [1, 2, 3], stop_token_ids=(expected[2],), ignore_eos=True))
    events = drain(engine)["a"]
    cut = expected.index(expected[2]) + 1
    assert tokens_of(events) == expected[:cut]
    assert (events[-1].finish, events[-1].stop_token) == (FinishReason.STOP, expected[2])


def test_min_tokens_keeps_a_request_going_past_a_stop_token():
    expected = expected_tokens([1, 2, 3], 1, VOCAB, 8)
    engine = make_engine()
    engine.submit(submit("a", [1, 2, 3], stop_token_ids=(expected[0],), min_tokens=4, ignore_eos=True))
    assert len(tokens_of(drain(engine)["a"])) >= 4


def test_the_context_bounds_prompt_and_answer_together():
    engine = make_engine(max_context=16, vocab_size=1000)
    engine.submit(submit("a", list(range(20, 30)), max_tokens=None, ignore_eos=True))
    assert len(tokens_of(drain(engine)["a"])) == 6


def test_a_second_equal_prompt_is_found_in_the_cache():
    engine = make_engine()
    prompt = list(range(20, 40))
    engine.submit(submit("a", prompt, max_tokens=2))
    first = drain(engine)["a"]
    engine.submit(submit("b", prompt, max_tokens=2))
    second = drain(engine)["b"]
    assert first[0].num_cached_tokens == 0
    assert second[0].num_cached_tokens == 16
    assert tokens_of(first) == tokens_of(second)


def test_tenants_and_adapters_do_not_share_blocks():
    engine = make_engine()
    prompt = list(range(20, 40))
    for name, owner in (("a", {}), ("b", {"tenant": "other"}), ("c", {"adapter": "style"})):
        plain = submit(name, prompt, max_tokens=1)
        request = Submit(request_id=name, prompt=prompt, params=plain.params, arrival=0.0, **owner)
        engine.submit(request)
        assert drain(engine)[name][0].num_cached_tokens == 0


def test_evicted_blocks_come_back_from_the_host_tier():
    engine = make_engine(num_blocks=17, host_slots=32)
    prompt = list(range(20, 60))
    engine.submit(submit("a", prompt, max_tokens=2))
    drain(engine)
    engine.submit(submit("b", list(range(90, 30, -1)), max_tokens=2))
    drain(engine)
    engine.submit(submit("c", prompt, max_tokens=2))
    assert drain(engine)["c"][0].num_cached_tokens == 36
    assert any(copy.to_host for plan in engine.runner.plans for copy in plan.tier_copies)


def test_long_prompts_run_in_chunks_beside_decoding_requests():
    engine = make_engine(max_step_tokens=8)
    engine.submit(submit("short", [1, 2], max_tokens=12, ignore_eos=True))
    engine.step()
    engine.step()
    engine.submit(submit("long", list(range(30)), max_tokens=1, ignore_eos=True))
    drain(engine)
    for plan in engine.runner.plans:
        assert plan.num_tokens <= 8
    both = [plan for plan in engine.runner.plans if len(plan.slices) == 2]
    assert len(both) >= 4
    assert all(plan.slices[0].num_tokens == 1 for plan in both)


def test_a_request_is_preempted_only_so_often():
    engine = make_engine(num_blocks=17, max_running=8, max_step_tokens=64, expected_output=0.0)
    preempted = {}
    original = engine.scheduler.placement.preempt

    def count(request):
        original(request)
        preempted[request.request_id] = request.num_preemptions

    engine.scheduler.placement.preempt = count
    for index in range(12):
        engine.submit(submit(f"r{index}", [index, 1, 2], seed=index, max_tokens=60, ignore_eos=True))
    drain(engine)
    assert preempted
    assert max(preempted.values()) <= MAX_PREEMPTIONS


def test_a_full_queue_refuses_with_a_time_to_come_back():
    engine = make_engine(max_running=1, max_waiting=1)
    assert engine.submit(submit("a", [1])) == []
    assert engine.submit(submit("b", [1])) == []
    [(_, refusal)] = engine.submit(submit("c", [1]))
    assert refusal.finish is FinishReason.ERROR
    assert refusal.error_code == Overloaded.code
    assert refusal.retry_after_seconds > 0
    assert set(drain(engine)) == {"a", "b"}


def test_a_failed_step_ends_only_its_own_requests():
    engine = make_engine(max_running=1)
    engine.runner.fail_at = {1}
    prompt = list(range(20, 40))
    engine.submit(submit("a", prompt))
    events = drain(engine)
    assert events["a"][-1].finish is FinishReason.ERROR
    engine.submit(submit("b", prompt))
    later = drain(engine)
    assert tokens_of(later["b"]) == reference(prompt, 1, 8)
    assert later["b"][0].num_cached_tokens == 0, "blocks that a failed step touched are not trusted"
    assert_clean(engine)


def test_a_request_of_higher_priority_starts_first():
    engine = make_engine(max_running=1)
    engine.submit(submit("low", [1], max_tokens=2, ignore_eos=True))
    high = submit("high", [2], max_tokens=2, ignore_eos=True)
    engine.submit(dataclass_replace(high, priority=5))
    first = next(event for _ in range(10) for _, event in engine.step())
    assert first.request_id == "high"


def dataclass_replace(message, **changes):
    return type(message)(**{**{name: getattr(message, name) for name in message.__struct_fields__}, **changes})


@pytest.mark.parametrize("num_preemptions", [0, MAX_PREEMPTIONS])
@pytest.mark.parametrize("foresight", [False, True])
def test_a_prompt_may_fill_the_context_where_one_token_is_drawn_behind_it(num_preemptions, foresight):
    engine = make_engine(num_blocks=64 // BLOCK + 1, foresight=foresight)
    prompt = [place % VOCAB for place in range(64)]
    assert engine.submit(submit("a", prompt, max_tokens=1)) == []
    (request,) = engine.scheduler.requests.values()
    request.num_preemptions = num_preemptions
    (event,) = drain(engine)["a"]
    assert event.token_ids == expected_tokens(prompt, 1, VOCAB, 1)
    assert event.finish is FinishReason.LENGTH
    assert_clean(engine)


@pytest.mark.parametrize(
    ("prompt", "error"),
    [([], InvalidParameter), ([VOCAB], InvalidParameter), ([-1], InvalidParameter), ([1] * 64, ContextTooLong)],
)
def test_an_impossible_prompt_is_refused_before_it_costs_anything(prompt, error):
    engine = make_engine()
    [(_, event)] = engine.submit(submit("a", prompt))
    assert event.error_code == error.code
    assert_clean(engine)


def test_speculation_accepts_several_tokens_in_one_step():
    engine = make_engine(drafts=4, vocab_size=2, max_context=64)
    engine.submit(submit("a", [0, 1, 0, 1, 1], max_tokens=40, ignore_eos=True))
    events = drain(engine)["a"]
    assert tokens_of(events) == expected_tokens([0, 1, 0, 1, 1], 1, 2, 40)
    assert engine.metrics.accepted_tokens > 0
    assert max(len(event.token_ids) for event in events) > 1


def test_a_dropped_client_leaves_nothing_behind():
    engine = make_engine()
    engine.submit(submit("a", [1, 2, 3], max_tokens=50, ignore_eos=True), client=b"one")
    engine.submit(submit("b", [1, 2, 3], max_tokens=3, ignore_eos=True), client=b"two")
    engine.step()
    engine.drop_client(b"one")
    assert set(drain(engine)) == {"b"}
    assert_clean(engine)


def test_the_plan_is_plain_data():
    assert dataclasses.is_dataclass(make_engine().scheduler.next_step())
