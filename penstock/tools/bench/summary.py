"""From the measurements of single requests to the figures of a run."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy

from penstock.tools.bench.client import Measurement
from penstock.tools.bench.document import Distribution, GeneratorHealth, Goodput, RequestRow, Run
from penstock.tools.bench.workload import PlannedRequest, Workload


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """What a request must keep to count as good. None: no limit."""

    ttft_ms: float | None = None
    time_per_token_ms: float | None = None

    @property
    def is_set(self) -> bool:
        return self.ttft_ms is not None or self.time_per_token_ms is not None

    def is_kept(self, row: RequestRow) -> bool:
        """Whether a completed request kept the limits. An answer of one token has no time per token to exceed."""
        if self.ttft_ms is not None and (row.ttft_ms is None or row.ttft_ms > self.ttft_ms):
            return False
        return self.time_per_token_ms is None or (row.time_per_token_ms or 0.0) <= self.time_per_token_ms


def distribution(values: Sequence[float]) -> Distribution | None:
    """Return mean and percentiles (linear between neighbours), or None where there is nothing to describe."""
    if not len(values):
        return None
    sorted_values = numpy.sort(numpy.asarray(values, dtype=numpy.float64))
    p50, p90, p95, p99 = (float(value) for value in numpy.percentile(sorted_values, [50, 90, 95, 99]))
    return Distribution(
        count=len(values),
        mean=float(sorted_values.mean()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        max=float(sorted_values[-1]),
    )


def summarise(
    workload: Workload,
    measured: Sequence[tuple[PlannedRequest, Measurement]],
    service_level: ServiceLevel,
    generator: GeneratorHealth | None = None,
    *,
    seconds: float | None = None,
    num_unfinished: int = 0,
) -> Run:
    """Return the figures of one run. It took `seconds`, or else from the first request sent to the last ended.

    Of a run that was cut short, `num_unfinished` requests were open or had not been sent.
    """
    started = min((item.sent for _, item in measured), default=0.0)
    if seconds is None:
        seconds = max((item.ended for _, item in measured), default=0.0) - started
    completed = [(request, item) for request, item in measured if item.error is None]
    failed = [item for _, item in measured if item.error is not None]
    rows = [_row(request, item, started) for request, item in completed]
    cached = [item.cached_tokens for _, item in completed if item.cached_tokens is not None]
    gaps = [gap for _, item in completed for gap in _gaps_ms(item)]
    return Run(
        label=workload.name,
        rate=workload.rate,
        concurrency=workload.concurrency,
        temperature=workload.temperature,
        num_requests=len(measured) + num_unfinished,
        num_completed=len(completed),
        seconds=seconds,
        input_tokens=sum(row.input_tokens for row in rows),
        output_tokens=sum(row.output_tokens for row in rows),
        counted_by=_counted_by([item for _, item in completed]),
        errors=dict(Counter(str(item.error) for item in failed).most_common()),
        error_examples={str(item.error): item.error_text for item in reversed(failed) if item.error_text},
        num_short=sum(
            row.output_tokens < request.max_tokens for row, (request, _) in zip(rows, completed, strict=True)
        ),
        num_unfinished=num_unfinished,
        cached_tokens=sum(cached) if cached else None,
        ttft_ms=distribution([row.ttft_ms for row in rows if row.ttft_ms is not None]),
        time_per_token_ms=distribution([row.time_per_token_ms for row in rows if row.time_per_token_ms is not None]),
        inter_token_ms=distribution(gaps),
        end_to_end_ms=distribution([row.end_to_end_ms for row in rows]),
        goodput=_goodput(rows, service_level, seconds) if service_level.is_set else None,
        generator=generator,
        requests=rows,
    )


def _row(request: PlannedRequest, item: Measurement, started: float) -> RequestRow:
    times = item.token_times
    output_tokens = item.output_tokens if item.output_tokens is not None else len(times)
    input_tokens = item.input_tokens if item.input_tokens is not None else request.prompt.num_tokens
    # Several tokens may share an event; what counts is how many came between the first and the last.
    steady = (times[-1] - times[0]) / (output_tokens - 1) if output_tokens > 1 and len(times) > 1 else None
    return RequestRow(
        sent_seconds=item.sent - started,
        ttft_ms=(times[0] - item.sent) * 1000 if times else None,
        time_per_token_ms=None if steady is None else steady * 1000,
        end_to_end_ms=(item.ended - item.sent) * 1000,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
    )


def _gaps_ms(item: Measurement) -> Iterator[float]:
    return ((after - before) * 1000 for before, after in pairwise(item.token_times))


def _counted_by(items: Sequence[Measurement]) -> Literal["usage", "chunks", "usage and chunks"]:
    with_usage = sum(item.output_tokens is not None for item in items)
    if with_usage == len(items):
        return "usage"
    return "usage and chunks" if with_usage else "chunks"


def _goodput(rows: Sequence[RequestRow], level: ServiceLevel, seconds: float) -> Goodput:
    good = sum(level.is_kept(row) for row in rows)
    return Goodput(level.ttft_ms, level.time_per_token_ms, good, good / seconds if seconds > 0 else 0.0)
