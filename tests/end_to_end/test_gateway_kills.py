"""Three real replicas, one killed every ten seconds for two minutes under load: callers notice next to nothing.

Run with -s for the figures. The simulated device is slow enough that it, and not this machine, sets the pace.
"""

import asyncio
import contextlib
import random
import re
import time
from dataclasses import dataclass, field

import aiohttp
import httpx
import pytest

from tests.fakes.gateway_process import (
    MODEL,
    GatewayProcess,
    kill_all,
    simulated_replicas,
    start_replica,
    write_simulated_model,
)
from tests.unit.server.sse import events_in, text_of

PACE = "10"
PROMPT_TOKENS = 1500
OUTPUT_TOKENS = 16
REQUESTS_PER_SECOND = 1.5
BASELINE_SECONDS = 60
KILLS = 12
KILL_SECONDS = 10


def body_of(number):
    draw = random.Random(number)
    prompt = [draw.randrange(5, 500) for _ in range(PROMPT_TOKENS)]
    return {
        "model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0,
        "stream": True,
    }  # fmt: skip


@dataclass
class Call:
    number: int
    at: float  # since the load began
    ttft: float = 0.0
    route: str = ""
    text: bytes = b""


@dataclass
class Load:
    """Callers who come at random moments, whatever becomes of those before them."""

    url: str
    calls: list[Call] = field(default_factory=list)

    async def run(self, seconds, other=None):
        """Call for so many seconds, and for as long as `other` takes."""
        began = time.monotonic()
        draw = random.Random(len(self.calls))
        timeout = aiohttp.ClientTimeout(total=120)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as client,
            asyncio.TaskGroup() as group,
        ):
            while time.monotonic() - began < seconds or (other is not None and not other.done()):
                call = Call(len(self.calls), time.monotonic() - began)
                self.calls.append(call)
                group.create_task(self._call(client, call))
                await asyncio.sleep(draw.expovariate(REQUESTS_PER_SECOND))
        if other is not None:
            await other

    async def _call(self, client, call):
        began = time.monotonic()
        async with client.post(f"{self.url}/v1/completions", json=body_of(call.number)) as response:
            call.route = response.headers.get("x-penstock-route", "")
            async for data in response.content.iter_any():
                call.ttft = call.ttft or time.monotonic() - began
                call.text += data


async def kill_in_turn(model, servers, stack):
    """Kill one server every ten seconds, as a machine that loses power does, and start it again at once.

    On a machine so busy that a start takes longer, the next is killed when the last is back: two always stand.
    """
    for number in range(KILLS):
        await asyncio.sleep(KILL_SECONDS)
        await asyncio.to_thread(servers[number % len(servers) - 1].wait_ready)
        place = number % len(servers)
        port = servers[place].url.rpartition(":")[2]
        kill_all(servers[place])
        servers[place] = stack.enter_context(start_replica(model, "--port", port, pace=PACE))
        servers[place].url = f"http://127.0.0.1:{port}"


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_replicas_killed_every_ten_seconds_lose_nothing_and_slow_nobody_much(tmp_path):
    model = write_simulated_model(tmp_path)
    with contextlib.ExitStack() as stack:
        servers = list(stack.enter_context(simulated_replicas(model, 3, pace=PACE)))
        arguments = [part for server in servers for part in ("--replica", server.url)]
        gateway = stack.enter_context(GatewayProcess(*arguments)).wait_ready()
        load = Load(gateway.url)
        await load.run(BASELINE_SECONDS)
        num_before = len(load.calls)
        killing = asyncio.create_task(kill_in_turn(model, servers, stack))
        await load.run(KILLS * KILL_SECONDS, killing)
        async with httpx.AsyncClient() as client:
            metrics = (await client.get(f"{gateway.url}/metrics")).text
    show(load.calls[:num_before], load.calls[num_before:])
    assert re.search(r'resumptions_total\{outcome="continued"\} [1-9]', metrics)
    assert 'outcome="lost"' not in metrics
    await check_texts(model, load.calls)
    baseline = percentile([call.ttft for call in load.calls[:num_before]], 0.99)
    assert percentile([call.ttft for call in load.calls[num_before:]], 0.99) <= 2 * baseline


def show(before, after):
    for name, calls in (("baseline", before), ("kills", after)):
        times = [call.ttft for call in calls]
        shares = ", ".join(f"p{share:g} {percentile(times, share / 100) * 1000:.0f} ms" for share in (50, 95, 99))
        print(f"{name}: {len(calls)} requests, TTFT {shares}")
    for call in sorted(after, key=lambda item: -item.ttft)[:8]:
        print(f"  at {call.at:.1f} s: {call.ttft * 1000:.0f} ms: {call.route}")


async def check_texts(model, calls):
    """Every answer is whole, and what a server that nobody killed answers."""
    with start_replica(model, pace="0.02") as reference:
        url = f"{reference.wait_ready().url}/v1/completions"
        async with httpx.AsyncClient(timeout=60) as client:
            for call in calls:
                events = events_in(call.text)
                assert events[-1] == "[DONE]"
                expected = (await client.post(url, json=body_of(call.number))).content
                assert text_of(events) == text_of(events_in(expected))
