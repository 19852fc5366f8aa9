"""A server measured under one or more workloads.

Finds out how the server wants to be asked, warms it up, runs each workload and gathers the figures. Knows nothing of
terminals or files.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.tools.bench.client import Measurement, StreamClient
from penstock.tools.bench.document import Report, new_report
from penstock.tools.bench.load import run_load
from penstock.tools.bench.probe import find_dialect
from penstock.tools.bench.request_body import Dialect, write_body
from penstock.tools.bench.summary import ServiceLevel, summarise
from penstock.tools.bench.watcher import Watcher
from penstock.tools.bench.workload import PlannedRequest, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeTarget:
    """Which server to ask, and how."""

    url: str
    api_key: str | None = None
    model: str | None = None  # None: the first served
    dialect: Dialect = field(default_factory=Dialect)
    warm_up_requests: int = 1


async def bench_serve(
    target: ServeTarget,
    workloads: Sequence[Workload],
    service_level: ServiceLevel,
    *,
    watcher: Watcher | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> Report:
    """Run the workloads one after the other against one server."""
    watcher = watcher or Watcher()
    async with StreamClient(target.url, target.api_key, now=now) as client:
        model = target.model or await client.first_model()
        dialect = await find_dialect(client, model, target.dialect)
        runs = []
        for workload in workloads:
            await _warm_up(client, workload, dialect, model, target.warm_up_requests)
            watcher.begin(workload.name, len(workload.requests))
            sender = HttpSender(client, workload, dialect, model)
            result = await run_load(workload, sender, on_done=watcher.one_done, now=now)
            runs.append(summarise(workload, result.measured, service_level, result.generator))
    return new_report(
        runs, target=client.url, model=model, prompts=dialect.prompts, ignored_end_of_text=dialect.ignore_eos
    )


@dataclass(frozen=True, slots=True)
class HttpSender:
    """Sends one workload's requests to one server."""

    client: StreamClient
    workload: Workload
    dialect: Dialect
    model: str

    def prepare(self, request: PlannedRequest) -> bytes:
        return write_body(self.workload, request, self.dialect, self.model)

    async def send(self, body: bytes) -> Measurement:
        return await self.client.measure(body, self.dialect)


async def _warm_up(client: StreamClient, workload: Workload, dialect: Dialect, model: str, count: int) -> None:
    warm_up = workload.warm_up(count)
    if warm_up.requests:
        await run_load(warm_up, HttpSender(client, warm_up, dialect, model))
