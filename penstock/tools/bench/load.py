"""Requests sent when they are due, or as many at a time as a closed loop allows.

Knows nothing of HTTP: a `Sender` makes the bytes and measures the answer.
"""

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from penstock.tools.bench.client import Measurement
from penstock.tools.bench.document import GeneratorHealth
from penstock.tools.bench.generator_health import HealthWatch
from penstock.tools.bench.workload import PlannedRequest, Workload

Measured = list[tuple[PlannedRequest, Measurement]]


class Sender(Protocol):
    def prepare(self, request: PlannedRequest) -> bytes:
        """Return the body to send. Called before the request is due."""

    async def send(self, body: bytes) -> Measurement:
        """Send it now and follow the answer."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    measured: Measured  # requests whose answers ended
    generator: GeneratorHealth
    cut_after_seconds: float | None = None  # None: it ran to its end


async def run_load(
    workload: Workload,
    sender: Sender,
    *,
    on_done: Callable[[], None] = lambda: None,
    now: Callable[[], float] = time.perf_counter,
) -> LoadResult:
    """Run a workload to its end, every request measured, and say how well this generator kept up.

    Cancelled, it ends what is open and returns what it has: whoever waited minutes for figures wants those there are.
    """
    measured: Measured = []
    late_seconds: list[float] = []
    cut_after_seconds = None
    with _collector_out_of_the_way():
        watch = HealthWatch(now=now)
        started = now()
        try:
            if workload.concurrency is not None:
                await _closed_loop(workload, workload.concurrency, sender, on_done, measured)
            else:
                await _open_loop(workload, sender, on_done, now, late_seconds, measured)
        except asyncio.CancelledError:
            _go_on()
            cut_after_seconds = now() - started
        # All at once is no schedule that could be kept: sending takes as long as it takes.
        generator = await watch.stop(late_seconds if workload.is_timed else [])
    return LoadResult(measured, generator, cut_after_seconds)


def _go_on() -> None:
    """Have this task no longer count as cancelled."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


async def _open_loop(
    workload: Workload,
    sender: Sender,
    on_done: Callable[[], None],
    now: Callable[[], float],
    late_seconds: list[float],
    measured: Measured,
) -> None:
    is_timed = workload.is_timed
    started = now()

    async def send(request: PlannedRequest, body: bytes) -> tuple[PlannedRequest, Measurement]:
        late_seconds.append(now() - started - request.start_seconds)
        measurement = await sender.send(body)
        on_done()
        return request, measurement

    tasks: list[asyncio.Task[tuple[PlannedRequest, Measurement]]] = []
    try:
        async with asyncio.TaskGroup() as group:
            for request in workload.requests:
                body = sender.prepare(request)
                if is_timed:
                    # Even where it is late already: those before it must get to run.
                    await asyncio.sleep(max(0.0, started + request.start_seconds - now()))
                tasks.append(group.create_task(send(request, body)))
    finally:
        measured += [task.result() for task in tasks if not task.cancelled() and task.exception() is None]


async def _closed_loop(
    workload: Workload, concurrency: int, sender: Sender, on_done: Callable[[], None], measured: Measured
) -> None:
    waiting = iter(workload.requests)

    async def keep_one_open() -> None:
        for request in waiting:
            measured.append((request, await sender.send(sender.prepare(request))))
            on_done()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(workload.requests))):
            group.create_task(keep_one_open())


@contextmanager
def _collector_out_of_the_way() -> Iterator[None]:
    """Leave what exists already, prompts above all, out of garbage collections: walking it would stall the loop."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
