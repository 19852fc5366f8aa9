"""KV-aware routing: the replica that has the prompt, unless another answers sooner."""

import collections
import random

import pytest

from penstock.fleet.adapters.interface import Load
from penstock.fleet.adapters.registry import ADAPTERS
from penstock.fleet.cached_blocks import CachedBlocks
from penstock.fleet.router.policies.kv_aware import KvAware
from penstock.fleet.router.ttft_model import TtftModel, prefill_work
from penstock.protocol.block_events import BlockChanges, BlockSnapshot, pack
from penstock.protocol.prompt_note import PromptNote
from tests.unit.fleet.conftest import make_query, make_replica


def prompt(number: int, length: int = 6400) -> list[int]:
    return [(number * 7919 + index) % 30000 for index in range(length)]


def answer(policy, choice, clock, seconds=0.1, cached=0, tokens=6400, note=None):
    clock.now += seconds
    policy.on_first_byte(choice, seconds, note or PromptNote(tokens, cached))
    policy.on_end(choice)


@pytest.fixture
def replicas(clock):
    return [make_replica(number, clock=clock) for number in range(4)]


def test_a_prompt_goes_where_its_beginning_was(clock, replicas):
    policy = KvAware(seed=1)
    homes = {}
    for number in range(12):
        choice = policy.choose(make_query(prompt=prompt(number)), replicas)
        homes[number] = choice.replica
        answer(policy, choice, clock)
    assert len(set(homes.values())) == 4
    for number, home in homes.items():
        choice = policy.choose(make_query(prompt=prompt(number) + prompt(99, 640)), replicas)
        assert choice.replica is home
        assert choice.cached_tokens == 6400
        assert "6400 of 7040 tokens cached" in choice.reason
        answer(policy, choice, clock, cached=6400, tokens=7040)


def test_text_is_known_again_too(clock, replicas):
    policy = KvAware(seed=1)
    messages = [{"role": "user", "content": "word " * 2000}]
    first = policy.choose(make_query(messages=messages), replicas)
    answer(policy, first, clock)
    longer = [*messages, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]
    second = policy.choose(make_query(messages=longer), replicas)
    assert second.replica is first.replica
    assert second.cached_tokens and second.cached_tokens > 2000


def test_one_tenants_prompt_is_not_anothers(clock, replicas):
    policy = KvAware(seed=1)
    answer(policy, policy.choose(make_query(prompt=prompt(1), tenant="a"), replicas), clock)
    assert policy.choose(make_query(prompt=prompt(1), tenant="b"), replicas).cached_tokens == 0


def test_what_a_replica_says_it_evicted_is_not_expected_there(clock, replicas):
    policy = KvAware(seed=1)
    for replica in replicas:
        replica.blocks = CachedBlocks(BlockSnapshot(0, 16, b""))
    choice = policy.choose(make_query(prompt=prompt(1)), replicas)
    names = list(range(1, 101))
    choice.replica.blocks.apply(BlockChanges(1, stored=pack(names)))
    answer(policy, choice, clock, note=PromptNote(6400, 0, 64, names))
    again = policy.choose(make_query(prompt=prompt(1)), replicas)
    assert again.replica is choice.replica and again.cached_tokens == 6400
    policy.on_end(again)
    choice.replica.blocks.apply(BlockChanges(2, removed=pack(names[50:])))
    assert policy.choose(make_query(prompt=prompt(1)), [choice.replica]).cached_tokens == 50 * 64


def test_a_prompt_that_a_replica_copies_from_its_host_keeps_others_away(clock, replicas):
    """Copies take the device as computing does, and the gateway learns how long."""
    policy = KvAware(seed=1)
    names = list(range(1, 101))
    replica = replicas[0]
    replica.blocks = CachedBlocks(BlockSnapshot(0, 16, pack(names)))
    answer(policy, policy.choose(make_query(prompt=prompt(1)), [replica]), clock, note=PromptNote(6400, 0, 64, names))
    for number in range(60):
        is_on_host = number % 2
        moved = {"to_host": pack(names)} if is_on_host else {"stored": pack(names)}
        replica.blocks.apply(BlockChanges(number + 1, **moved))
        choice = policy.choose(make_query(prompt=prompt(1)), [replica])
        answer(policy, choice, clock, 3.0 if is_on_host else 0.03, note=PromptNote(6400, 6400, 64, names))
        clock.now += 60
    assert 0.5 < (policy.choose(make_query(prompt=prompt(1)), [replica]).predicted_ttft_seconds or 0) < 4.0
    # It has that before it now: what would have to be computed anywhere goes elsewhere, whatever that replica did.
    policy.choose(make_query(prompt=prompt(3, 640)), [replicas[1]])
    assert policy.choose(make_query(prompt=prompt(2)), replicas[:2]).replica is replicas[1]


def test_a_replica_with_work_before_it_is_passed_over_by_new_prompts(clock, replicas):
    policy = KvAware(seed=1)
    chosen = [policy.choose(make_query(prompt=prompt(number)), replicas).replica.name for number in range(8)]
    assert set(collections.Counter(chosen).values()) == {2}


@pytest.mark.parametrize(("kind", "waits"), [("penstock", False), ("vllm", True)])
def test_a_short_prompt_waits_for_a_long_one_only_where_it_does_not_pass(clock, replicas, kind, waits):
    policy = KvAware(seed=1)
    (replica,) = replicas[:1]
    replica.adapter = ADAPTERS.load(kind)
    alone = policy.choose(make_query(prompt=prompt(1, 640)), [replica])
    policy.on_end(alone)
    policy.choose(make_query(prompt=prompt(2, 64_000)), [replica])
    behind = policy.choose(make_query(prompt=prompt(3, 640)), [replica])
    assert alone.predicted_ttft_seconds is not None and behind.predicted_ttft_seconds is not None
    assert (behind.predicted_ttft_seconds > 2 * alone.predicted_ttft_seconds) is waits
    # A prompt that is as long or longer waits in any case.
    longer = policy.choose(make_query(prompt=prompt(4, 64_000)), [replica])
    assert longer.predicted_ttft_seconds is not None
    assert longer.predicted_ttft_seconds > 15 * alone.predicted_ttft_seconds


def test_a_short_prompt_keeps_out_of_the_way_of_long_ones(clock, replicas):
    policy = KvAware(seed=1)
    for number in range(3):
        policy.choose(make_query(prompt=prompt(number, 64_000)), replicas[:1])
        # The other was given as much, and has done it.
        policy.on_end(policy.choose(make_query(prompt=prompt(number + 4, 64_000)), replicas[1:2]))
    # It would pass all three there; here it waits for one that is as long as itself, and nobody waits for it.
    policy.choose(make_query(prompt=prompt(8, 640)), replicas[1:2])
    assert policy.choose(make_query(prompt=prompt(9, 640)), replicas[:2]).replica is replicas[1]


def test_prompts_whose_time_has_passed_are_not_waited_for(clock, replicas):
    """An answer that is not streamed comes whole, long after its prompt was computed."""
    policy = KvAware(seed=1)
    for number in range(3):
        policy.choose(make_query(prompt=prompt(number)), replicas[:1])
    behind = policy.choose(make_query(prompt=prompt(9)), replicas[:1])
    policy.on_end(behind)
    clock.now += 600
    later = policy.choose(make_query(prompt=prompt(10)), replicas[:1])
    assert (later.predicted_ttft_seconds or 0) < 0.5 * (behind.predicted_ttft_seconds or 0)


def test_a_hot_prefix_comes_to_live_on_several_replicas(clock, replicas):
    """Everybody's prompt begins alike, and one replica alone could serve half of them."""
    policy = KvAware(seed=1)
    shared = prompt(0, 1280)
    free_at = dict.fromkeys(replicas, clock.now)
    has_shared: set[object] = set()
    under_way: list[tuple[float, float, object, PromptNote]] = []
    waits, counts = [], collections.Counter()
    for number in range(800):
        clock.now += 0.025
        for ends, sent, choice, note in [item for item in under_way if item[0] <= clock.now]:
            policy.on_first_byte(choice, ends - sent, note)
            policy.on_end(choice)
        under_way = [item for item in under_way if item[0] > clock.now]
        choice = policy.choose(make_query(prompt=shared + prompt(number + 1, 640)), replicas)
        cached = 1280 if choice.replica in has_shared else 0
        has_shared.add(choice.replica)
        free_at[choice.replica] = max(free_at[choice.replica], clock.now) + (1920 - cached) / 12_500
        under_way.append((free_at[choice.replica], clock.now, choice, PromptNote(1920, cached)))
        waits.append(free_at[choice.replica] - clock.now)
        counts[choice.replica.name] += number >= 400
    assert max(counts.values()) <= 1.3 * 100
    assert max(waits[400:]) < 0.5


def test_what_exceeds_the_replicas_cache_is_forgotten(clock):
    replica = make_replica(0, clock=clock)
    replica.note_load(Load(kv_tokens=12800))
    policy = KvAware(seed=1)
    for number in range(3):
        answer(policy, policy.choose(make_query(prompt=prompt(number)), [replica]), clock)
    found = [policy.choose(make_query(prompt=prompt(number)), [replica]).cached_tokens for number in (2, 0)]
    assert found == [6400, 0]


def test_a_replica_that_tells_of_more_blocks_than_its_device_holds_is_believed(clock):
    replica = make_replica(0, clock=clock)
    replica.note_load(Load(kv_tokens=640))
    replica.blocks = CachedBlocks(BlockSnapshot(0, 16, pack(range(400))))
    policy = KvAware(seed=1)
    note = PromptNote(6400, 0, 64, list(range(100)))
    answer(policy, policy.choose(make_query(prompt=prompt(0)), [replica]), clock, note=note)
    assert policy.choose(make_query(prompt=prompt(0)), [replica]).cached_tokens == 6400


def test_the_prediction_comes_to_fit_what_is_seen(clock, replicas):
    policy = KvAware(seed=1)
    errors = []
    for number in range(200):
        length = random.Random(number).randrange(640, 20000)
        choice = policy.choose(make_query(prompt=prompt(number, length)), replicas)
        seconds = 0.03 + 40e-6 * length
        errors.append(abs((choice.predicted_ttft_seconds or 0) / seconds - 1))
        answer(policy, choice, clock, seconds, tokens=length)
    assert sorted(errors[100:])[50] < 0.1


def test_requests_that_fail_leave_nothing_behind(clock, replicas):
    policy = KvAware(seed=1)
    idle = policy.choose(make_query(prompt=prompt(0)), replicas[:1])
    policy.on_end(idle)
    busy = policy.choose(make_query(prompt=prompt(50)), replicas[:1])
    policy.on_end(busy)
    last = policy.choose(make_query(prompt=prompt(100)), replicas[:1])
    assert "0 prompts before it" in last.reason


def test_a_time_that_nobody_expected_changes_little():
    model = TtftModel()
    for _ in range(100):
        model.observe(prefill_work(1000, 0), 0, 0.1)
    before = model.seconds(prefill_work(1000, 0), 0)
    model.observe(prefill_work(1000, 0), 0, 1000.0)
    assert model.seconds(prefill_work(1000, 0), 0) < 1.2 * before
