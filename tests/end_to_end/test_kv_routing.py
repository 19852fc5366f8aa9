"""KV-aware routing with real processes: block events from engine to gateway, and a trace over real CPU engines."""

import asyncio
import contextlib
import json
import os
import random
import re
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from penstock.tools.bench.client import StreamClient
from penstock.tools.bench.document import Run
from penstock.tools.bench.load import run_load
from penstock.tools.bench.request_body import Dialect
from penstock.tools.bench.serve_bench import HttpSender
from penstock.tools.bench.summary import ServiceLevel, summarise
from penstock.tools.bench.trace import read_trace
from penstock.tools.bench.workload import FixedPrompt, PlannedRequest, SeededPrompt, Workload
from penstock.tools.simulator.infinite_cache import InfiniteCache
from tests.fakes.gateway_process import MODEL, GatewayProcess, simulated_replicas, write_simulated_model
from tests.server_process import ServerProcess, until

TRACE = Path(__file__).parents[2].parent / "shared" / "data" / "mooncake_conversation.jsonl"
NUM_REPLICAS = 4
NUM_LINES = 3000
NUM_REQUESTS = 250
SCALE = 32  # tokens of the trace that become one
# How fast the trace passes follows the machine: routed in turn, it is so much of what the engines get done.
LOAD = 1.1
FULL_SPEED_CONCURRENCY = 2 * NUM_REPLICAS  # no engine is ever idle
MAX_DRIFT = 1.2  # of the machine's speed while it measures, or the policies did not have the same load
NUM_TRIES = 5


def gateway_over(servers: list[ServerProcess], policy: str) -> GatewayProcess:
    replicas = [part for server in servers for part in ("--replica", server.url)]
    return GatewayProcess("--policy", policy, *replicas)


def metric(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if re.match(rf"{name}[ {{]", line))


def is_heard(url: str) -> bool:
    return httpx.get(f"{url}/metrics", timeout=30).text.count("penstock_gateway_known_blocks{") == 2


def test_the_gateway_knows_from_the_engines_which_of_them_has_a_prompt(tmp_path):
    model = write_simulated_model(tmp_path)
    with simulated_replicas(model, 2) as servers, gateway_over(servers, "kv-aware") as gateway:
        gateway.wait_ready()

        def routes(prompt: list[int]) -> str:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
            return httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=60).headers["x-penstock-route"]

        until(lambda: is_heard(gateway.url), 30, "block events")
        first = routes(list(range(200)))
        assert "; cached_tokens=0" in first
        until(lambda: metric(gateway.url, "penstock_gateway_known_blocks") >= 12, 30, "the prompt's blocks")
        again = routes(list(range(200)))
        assert "predicted_cached_tokens=192; cached_tokens=192" in again
        assert first.split(";")[0] == again.split(";")[0]


def scaled_trace() -> Workload:
    """The trace's first conversations of three turns or more, a thirty-second as long."""
    by_conversation: dict[int, list[tuple[PlannedRequest, SeededPrompt]]] = {}
    for planned in read_trace(TRACE, NUM_LINES).requests:
        prompt = planned.prompt
        assert isinstance(prompt, SeededPrompt)
        # Nearly all prompts begin with the same block; the second is a conversation's own.
        if len(prompt.seeds) > 1:
            by_conversation.setdefault(prompt.seeds[1], []).append((planned, prompt))
    chosen = [item for turns in by_conversation.values() if len(turns) >= 3 for item in turns]
    chosen.sort(key=lambda item: item[0].start_seconds)
    return Workload(name="mooncake, scaled down", requests=tuple(_scaled(*item) for item in chosen[:NUM_REQUESTS]))


def _scaled(planned: PlannedRequest, prompt: SeededPrompt) -> PlannedRequest:
    ids = [random.Random(f"{seed} {at}").randrange(200) for seed in prompt.seeds for at in range(512 // SCALE)]
    length = max(1, prompt.num_tokens // SCALE)
    return PlannedRequest(FixedPrompt(ids[:length]), max(1, planned.max_tokens // 64), planned.start_seconds)


def infinite_hits(workload: Workload) -> int:
    cache = InfiniteCache(16)
    for planned in workload.requests:
        cache.see(workload.token_ids(planned))
    return cache.hit_tokens


@contextlib.contextmanager
def cpu_servers(model: Path):
    """Real engines with weights of no meaning, one thread each."""
    options = ["--load-format", "dummy", "--device", "cpu", "--threads", "1", "--store", "none"]
    options += ["--max-context-tokens", "4096", "--kv-memory", "512MiB", "--max-running", "16"]
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ServerProcess(str(model), *options)) for _ in range(NUM_REPLICAS)]
        for server in servers:
            server.wait_ready(300)
        yield servers


async def measure(url: str, workload: Workload) -> Run:
    async with StreamClient(url) as client:
        result = await run_load(workload, HttpSender(client, workload, Dialect(), MODEL))
    return summarise(workload, result.measured, ServiceLevel())


def run_policy(model: Path, policy: str, workload: Workload) -> tuple[Run, float]:
    """Return the figures, and the most prompt tokens that one replica computed over the mean."""
    with cpu_servers(model) as servers, gateway_over(servers, policy) as gateway:
        gateway.wait_ready()
        run = asyncio.run(measure(gateway.url, workload))
        asked = [metric(server.url, "penstock_prefix_query_tokens_total") for server in servers]
        found = [metric(server.url, "penstock_prefix_hit_tokens_total") for server in servers]
        computed = [query - hit for query, hit in zip(asked, found, strict=True)]
    return run, max(computed) * len(computed) / sum(computed)


@dataclass(frozen=True)
class Comparison:
    """One load, routed in two ways."""

    aware: Run
    imbalance: float  # of that one
    in_turn: Run
    full_speed_seconds: tuple[float, float]  # before and after
    load_seconds: float


def seconds_at_full_speed(model: Path, trace: Workload) -> float:
    """Return how long the engines take for a trace, routed in turn, when none of them is ever idle."""
    run, _ = run_policy(model, "round-robin", trace.in_closed_loop(FULL_SPEED_CONCURRENCY))
    assert run.num_completed == NUM_REQUESTS
    return run.seconds


def compare(model: Path, trace: Workload) -> Comparison:
    """Measure both policies between two looks at how fast the machine is, until these agree."""
    for _ in range(NUM_TRIES):
        before = seconds_at_full_speed(model, trace)
        load_seconds = before / LOAD
        workload = trace.faster(trace.requests[-1].start_seconds / load_seconds)
        aware, imbalance = run_policy(model, "kv-aware", workload)
        in_turn, _ = run_policy(model, "round-robin", workload)
        after = seconds_at_full_speed(model, trace)
        if max(before, after) <= MAX_DRIFT * min(before, after):
            return Comparison(aware, imbalance, in_turn, (before, after), load_seconds)
    pytest.fail("the machine never kept its speed for long enough; do nothing else on it meanwhile")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not TRACE.exists(), reason="the recorded trace (../shared/data) is not here")
def test_on_a_scaled_down_trace_real_engines_find_their_prefixes(tmp_path, capsys):
    model = write_simulated_model(tmp_path)
    config = json.loads((model / "config.json").read_text())
    config |= {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "max_position_embeddings": 4096}
    (model / "config.json").write_text(json.dumps(config))
    trace = scaled_trace()
    most = infinite_hits(trace)
    measured = compare(model, trace)
    aware, in_turn = measured.aware, measured.in_turn
    assert aware.ttft_ms is not None and in_turn.ttft_ms is not None
    with capsys.disabled():
        before, after = measured.full_speed_seconds
        print(f"\nat full speed {before:.1f} s before and {after:.1f} s after; sent in {measured.load_seconds:.1f} s")
        for name, run in (("kv-aware", aware), ("round-robin", in_turn)):
            share = (run.cached_tokens or 0) / most
            assert run.ttft_ms is not None
            print(f"{name}: {share:.1%} of an infinite cache's hits, TTFT p95 {run.ttft_ms.p95:.0f} ms", end="; ")
        print(f"kv-aware's most work {measured.imbalance:.2f} x the mean; load average {os.getloadavg()[0]:.1f}")
    assert aware.num_completed == in_turn.num_completed == NUM_REQUESTS
    assert (aware.cached_tokens or 0) >= 0.95 * most
    assert aware.ttft_ms.p95 <= in_turn.ttft_ms.p95 / 2
    assert measured.imbalance <= 1.3
