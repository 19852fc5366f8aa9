"""Load that goes on: does memory or the number of files grow, and does every request end in exactly one way?"""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.faults.caller import Outcome, call, completion_body, tally
from tests.server_process import ServerProcess, until

# A small cache, all of which has been used once before the measuring begins: untouched memory is not resident.
SOAK_FLAGS = ("--load-format", "dummy", "--kv-memory", "4MiB", "--log-format", "json")
# torch keeps 256 compiled products (`engine/process.py`), one for each shape of a matrix and number of tokens. Prompts
# of every length up to here come first and fill that: a layer has four shapes.
_LONGEST_FIRST_PROMPT = 128

_PAGE_KB = os.sysconf("SC_PAGE_SIZE") / 1024
# By then allocators and thread pools have their size.
_WARM_UP_PART = 0.5


@dataclass(frozen=True)
class Sample:
    num_requests: int
    resident_kb: list[float]  # of each process
    num_files: int


@dataclass(frozen=True)
class SteadyReport:
    """What `steady` found."""

    num_requests: int
    seconds: float
    kb_per_request: float  # slope of resident memory, all processes together
    kb_per_request_of_each: dict[str, float]
    num_files_first: int
    num_files_last: int
    outcomes: dict[str, int]


def family(server: ServerProcess) -> list[int]:
    """The server's processes, the chat template's included."""
    found, waiting = [], [server.process.pid]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found


def name_of(pid: int) -> str:
    """The module that a process runs."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[2].decode()


def sample(pids: list[int], num_requests: int) -> Sample:
    resident = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_KB for pid in pids]
    files = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
    return Sample(num_requests, resident, files)


def random_body(dice: random.Random) -> bytes:
    """Short and long, whole and streamed, shared beginnings and not, and now and then a mistake."""
    shared = list(range(3, 3 + dice.choice([0, 40, 100])))
    changes: dict[str, object] = {
        "prompt": shared + [dice.randrange(3, 500) for _ in range(dice.randrange(1, 20))],
        "max_tokens": dice.choice([1, 4, 16]),
        "stream": dice.random() < 0.5,
        "temperature": dice.choice([0, 1]),
        "n": dice.choice([1, 1, 1, 2]),
    }
    if dice.random() < 0.05:
        changes["temperature"] = 7
    return completion_body(**changes)


async def fill_caches(server: ServerProcess) -> None:
    """Have a step of every number of tokens, with prompts that begin unlike any other."""
    for num_tokens in range(2, _LONGEST_FIRST_PROMPT + 1):
        prompt = random.Random(num_tokens).choices(range(3, 500), k=num_tokens)
        outcome = await call(server.url, completion_body(prompt=prompt, max_tokens=1, stream=False))
        assert outcome.state == "completed"


async def steady(server: ServerProcess, seconds: float, *, num_callers: int = 8) -> SteadyReport:
    """Keep callers busy, some of whom leave early, and watch the processes."""
    await fill_caches(server)
    outcomes: list[str] = []
    stop = time.monotonic() + seconds

    async def caller(number: int) -> None:
        dice = random.Random(number)
        while time.monotonic() < stop:
            leave = 0.01 if dice.random() < 0.05 else None
            outcomes.append((await call(server.url, random_body(dice), leave_after_seconds=leave)).state)

    callers = [asyncio.create_task(caller(number)) for number in range(num_callers)]
    pids, samples, began = family(server), [], time.monotonic()
    while time.monotonic() < stop:
        await asyncio.sleep(1.0)
        samples.append(sample(pids, len(outcomes)))
    await asyncio.gather(*callers)
    until(lambda: server.metric("penstock_kv_blocks_used") == 0, 10, "an idle engine")
    warm = [item for item in samples if item.num_requests >= _WARM_UP_PART * len(outcomes)]
    places = [item.num_requests for item in warm]
    slopes = {
        f"{name_of(pid)} {pid}": slope(places, [item.resident_kb[index] for item in warm])
        for index, pid in enumerate(pids)
    }
    return SteadyReport(
        len(outcomes),
        time.monotonic() - began,
        sum(slopes.values()),
        slopes,
        warm[0].num_files,
        warm[-1].num_files,
        dict(Counter(outcomes)),
    )


def is_back(server: ServerProcess, dead: int, num_workers: int) -> bool:
    """Whether a new process has taken a killed one's place, and the server serves."""
    if server.process.poll() is not None:
        raise RuntimeError("the server gave up:\n" + "\n".join(server.lines[-20:]))
    workers = server.worker_pids
    return len(workers) == num_workers and dead not in (server.engine_pid, *workers) and server.get("/ready")[0] == 200


def slope(places: list[int], values: list[float]) -> float:
    """Least squares."""
    mean_place, mean_value = sum(places) / len(places), sum(values) / len(values)
    spread = sum((place - mean_place) ** 2 for place in places)
    shared = sum((place - mean_place) * (value - mean_value) for place, value in zip(places, values, strict=True))
    return shared / spread if spread else 0.0


async def killing(server: ServerProcess, num_kills: int, *, num_callers: int = 8, seed: int = 1) -> Counter[str]:
    """Kill the engine or an API worker again and again under load; return how the requests ended.

    Every request that was sent is in the ledger once; a second end, or none, fails.
    """
    dice = random.Random(seed)
    ledger: dict[str, Outcome] = {}
    stopping = asyncio.Event()

    async def caller(number: int) -> None:
        own = random.Random(seed * 1000 + number)
        count = 0
        while not stopping.is_set():
            name = f"{number}-{count}"
            async with asyncio.timeout(60):  # a request without an end
                outcome = await call(server.url, random_body(own))
            assert name not in ledger
            ledger[name] = outcome
            count += 1
            if outcome.state != "completed":
                await asyncio.sleep(0.05)

    callers = [asyncio.create_task(caller(number)) for number in range(num_callers)]
    num_workers = len(server.worker_pids)
    for _ in range(num_kills):
        await asyncio.sleep(dice.uniform(0.3, 1.0))
        victim = server.engine_pid if dice.random() < 0.5 else server.worker_pids[0]
        os.kill(victim, signal.SIGKILL)
        await asyncio.to_thread(
            until, lambda dead=victim: is_back(server, dead, num_workers), 60, "readiness after a kill"
        )
    await asyncio.sleep(0.5)
    stopping.set()
    await asyncio.gather(*callers)
    until(lambda: server.metric("penstock_kv_blocks_used") == 0, 10, "an idle engine")
    until(lambda: server.metric("penstock_total_running_requests") == 0, 10, "an idle engine")
    return tally(list(ledger.values()))
