"""A server measured under one or more workloads.

Finds out how the server wants to be asked, warms it up, runs each workload and gathers the figures. Knows nothing of
terminals or files.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.tools.bench.client import Measurement, StreamClient
from penstock.tools.bench.document import Report, Run, new_report
from penstock.tools.bench.load import LoadResult, run_load
from penstock.tools.bench.probe import find_dialect
from penstock.tools.bench.request_body import Dialect, write_body
from penstock.tools.bench.silence import silence_told
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
    """Run the workloads one after the other against one server.

    Cancelled while one of them runs, or is warmed up for, it returns what was measured until then.
    """
    watcher = watcher or Watcher()
    async with (
        StreamClient(target.url, target.api_key, now=now) as client,
        silence_told(client, watcher.waiting, now=now),
    ):
        model = target.model or await client.first_model()
        dialect = await find_dialect(client, model, target.dialect)
        runs: list[Run] = []
        cut_short = False
        for workload in workloads:
            cut_short = not await _warm_up(client, workload, dialect, model, target.warm_up_requests)
            if cut_short:
                break
            watcher.begin(workload.name, len(workload.requests))
            sender = HttpSender(client, workload, dialect, model)
            result = await run_load(workload, sender, on_done=watcher.one_done, now=now)
            runs.append(_summary(workload, result, service_level))
            cut_short = result.cut_after_seconds is not None
            if cut_short:
                break
    return new_report(
        runs,
        target=client.url,
        model=model,
        prompts=dialect.prompts,
        ignored_end_of_text=dialect.ignore_eos,
        cut_short=cut_short,
    )


def _summary(workload: Workload, result: LoadResult, service_level: ServiceLevel) -> Run:
    return summarise(
        workload,
        result.measured,
        service_level,
        result.generator,
        seconds=result.cut_after_seconds,
        num_unfinished=len(workload.requests) - len(result.measured),
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


async def _warm_up(client: StreamClient, workload: Workload, dialect: Dialect, model: str, count: int) -> bool:
    """Return whether it ran to its end."""
    warm_up = workload.warm_up(count)
    if not warm_up.requests:
        return True
    return (await run_load(warm_up, HttpSender(client, warm_up, dialect, model))).cut_after_seconds is None
