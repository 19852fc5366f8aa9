"""KV-aware routing over simulated replicas, against round robin and one infinite cache."""

import random
from pathlib import Path

import msgspec
import pytest

from penstock.config import gather
from penstock.engine.simulated.profile import read_profile
from penstock.tools.bench.document import Run
from penstock.tools.bench.summary import ServiceLevel
from penstock.tools.bench.trace import read_trace
from penstock.tools.bench.workload import PlannedRequest, SeededPrompt, Workload
from penstock.tools.simulator.infinite_cache import InfiniteCache
from penstock.tools.simulator.server import configure
from penstock.tools.simulator.simulation import simulate_run
from tests.fakes.small_profile import small_profile

TRACE = Path(__file__).parents[5] / "shared" / "data" / "mooncake_conversation.jsonl"


def conversations(count: int, seconds: float) -> Workload:
    """Conversations of three turns that begin alike and at any time, each turn with all that was said before."""
    draw = random.Random(1)
    requests = []
    for number in range(count):
        start, seeds = draw.uniform(0, seconds), [0]
        for turn in range(3):
            seeds += [1000 + 10 * number + 2 * turn, 1001 + 10 * number + 2 * turn]
            requests.append(PlannedRequest(SeededPrompt(tuple(seeds), 512 * len(seeds)), 8, start))
            start += draw.uniform(5, 15)
    return Workload(name="conversations", requests=tuple(sorted(requests, key=lambda item: item.start_seconds)))


def share_found(run: Run) -> float:
    assert run.fleet is not None
    return (run.cached_tokens or 0) / run.fleet.infinite_cache_tokens


def test_conversations_stay_where_they_are_cached_and_the_work_is_even():
    profile = small_profile(vocab_size=32000, max_context_tokens=4096)
    load = conversations(60, 60)

    def run(policy: str) -> Run:
        server = configure(gather({}, environ={}), profile, num_replicas=4, policy=policy)
        return simulate_run(server, load, ServiceLevel())

    aware, in_turn = run("kv-aware"), run("round-robin")
    assert aware.fleet is not None and aware.ttft_ms is not None and in_turn.ttft_ms is not None
    assert aware.num_completed == in_turn.num_completed == 180
    assert share_found(aware) >= 0.95
    assert share_found(in_turn) < 0.8
    assert aware.ttft_ms.p95 <= in_turn.ttft_ms.p95 / 2
    assert aware.fleet.imbalance <= 1.3
    # What is computed again is work; decoding alone is hardly any, though it keeps devices busy.
    assert in_turn.fleet is not None
    assert 0.0 < aware.fleet.utilization < in_turn.fleet.utilization < 1.0
    assert sum(aware.fleet.work_seconds) < sum(aware.fleet.busy_seconds)


def test_an_infinite_cache_finds_every_whole_block_that_was_seen_and_computes_one_token():
    cache = InfiniteCache(4)
    cache.see(range(12))
    cache.see(range(12))
    cache.see([*range(6), 99, 99])
    assert cache.hit_tokens == 0 + 8 + 4


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not TRACE.exists(), reason="the recorded trace (../shared/data) is not here")
@pytest.mark.parametrize(("tier_block_ms", "speed"), [(0.3945, 1.15), (0.055, 1.55)])
def test_on_the_mooncake_trace_it_finds_what_one_infinite_cache_would(tier_block_ms: float, speed: float):
    """The first 3,000 requests of the trace, with copies to and from the host that are slow or fast.

    At the lowest of the rates in docs/simulation.md at which work is over 70 % of the time of replicas that are asked
    in turn. That page has the command, what it is at other rates, and why no router can be twice as good where they
    have time to spare.
    """
    options = gather({"host_kv_memory": "768GiB"}, environ={})
    profile = msgspec.structs.replace(read_profile("h200-llama-8b"), tier_block_ms=tier_block_ms)

    def run(policy: str) -> Run:
        server = configure(options, profile, num_replicas=4, policy=policy)
        return simulate_run(server, read_trace(TRACE, 3000).faster(speed), ServiceLevel())

    aware, in_turn = run("kv-aware"), run("round-robin")
    assert aware.fleet is not None and aware.ttft_ms is not None
    assert in_turn.fleet is not None and in_turn.ttft_ms is not None
    assert aware.num_completed == in_turn.num_completed == 3000
    assert 0.7 <= in_turn.fleet.utilization < 0.8
    assert share_found(aware) >= 0.95
    assert aware.ttft_ms.p95 <= in_turn.ttft_ms.p95 / 2
    assert aware.fleet.imbalance <= 1.3
