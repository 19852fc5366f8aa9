"""A benchmark's result as it is written, read and compared.

Plain data with its units in its names. Knows nothing of how it was measured or how it is shown.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

import penstock
from penstock.errors import ConfigError


class Distribution(msgspec.Struct, frozen=True):
    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Goodput(msgspec.Struct, frozen=True):
    """Requests that kept every limit. None: no such limit was set."""

    ttft_limit_ms: float | None
    time_per_token_limit_ms: float | None
    num_requests: int
    requests_per_second: float


class GeneratorHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How well the load generator itself kept up. Any warning means that latencies may be its own."""

    loop_lag_p99_ms: float
    loop_lag_max_ms: float
    late_send_p99_ms: float
    cpu_share: float  # of one core
    warnings: list[str]


class FleetFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How replicas shared a run's work. One entry of each list is one replica's."""

    policy: str
    busy_seconds: list[float]  # of its device, with steps, be it with a single row that decodes
    work_seconds: list[float]  # of that, what tokens and copies cost beyond what every step costs anyway
    computed_tokens: list[int]  # prompt tokens that it had not cached
    replica_seconds: float  # of all, from start to end
    infinite_cache_tokens: int  # prompt tokens that a single cache without a limit would have had

    @property
    def imbalance(self) -> float:
        """The most work of a replica over the mean."""
        return max(self.work_seconds) * len(self.work_seconds) / (sum(self.work_seconds) or 1.0)

    @property
    def utilization(self) -> float:
        """The part of the replicas' time that went into work; a replica that only decodes is busy, and hardly used."""
        return sum(self.work_seconds) / self.replica_seconds if self.replica_seconds else 0.0


class RequestRow(msgspec.Struct, frozen=True, array_like=True):
    """One request that completed; seconds count from the start of the run. Written as a list, for size."""

    sent_seconds: float
    ttft_ms: float | None
    time_per_token_ms: float | None
    end_to_end_ms: float
    input_tokens: int
    output_tokens: int


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One workload run once. Tokens and latencies are those of the requests that completed."""

    label: str
    num_requests: int
    num_completed: int
    seconds: float  # from the first request sent to the last ended, or to where it was cut short
    input_tokens: int
    output_tokens: int
    counted_by: Literal["usage", "chunks", "usage and chunks", "engine"]
    rate: float | None = None
    concurrency: int | None = None
    temperature: float = 0.0
    errors: dict[str, int] = {}
    error_examples: dict[str, str] = {}
    num_short: int = 0  # answers with fewer tokens than asked for
    num_unfinished: int = 0  # requests that were open or not sent yet when the run was cut short
    cached_tokens: int | None = None
    ttft_ms: Distribution | None = None
    time_per_token_ms: Distribution | None = None
    inter_token_ms: Distribution | None = None
    end_to_end_ms: Distribution | None = None
    goodput: Goodput | None = None
    decode_ms_per_token: float | None = None
    generator: GeneratorHealth | None = None
    fleet: FleetFigures | None = None
    requests: list[RequestRow] = []

    @property
    def requests_per_second(self) -> float:
        return self.num_completed / self.seconds if self.seconds > 0 else 0.0

    @property
    def input_tokens_per_second(self) -> float:
        return self.input_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def output_tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds if self.seconds > 0 else 0.0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one command measured."""

    version: str  # of the Penstock that measured
    made_at: str
    target: str  # a URL, or the model where there was no server
    model: str
    prompts: str  # how they were sent
    ignored_end_of_text: bool
    runs: list[Run]
    cut_short: bool = False  # the last run may have requests unfinished, and others may be missing behind it
    format: Literal["penstock-bench-1"] = "penstock-bench-1"


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a run that is worth comparing. Those with a `short` name are the ones to look at first."""

    name: str
    short: str | None
    lower_is_better: bool
    of: Callable[[Run], float | None]
    is_optional: bool = False  # measured only where it was asked for: a run without it tells nothing


def _at(distribution: Distribution | None, percentile: Literal["p50", "p95", "p99"]) -> float | None:
    if distribution is None:
        return None
    return {"p50": distribution.p50, "p95": distribution.p95, "p99": distribution.p99}[percentile]


def _positive(value: float) -> float | None:
    return value if value > 0 else None


FIGURES = (
    Figure("TTFT p50, ms", "TTFT p50", True, lambda run: _at(run.ttft_ms, "p50")),
    Figure("TTFT p95, ms", None, True, lambda run: _at(run.ttft_ms, "p95")),
    Figure("TTFT p99, ms", "p99", True, lambda run: _at(run.ttft_ms, "p99")),
    Figure("time per token p50, ms", "TPOT p50", True, lambda run: _at(run.time_per_token_ms, "p50")),
    Figure("time per token p95, ms", None, True, lambda run: _at(run.time_per_token_ms, "p95")),
    Figure("time per token p99, ms", "p99", True, lambda run: _at(run.time_per_token_ms, "p99")),
    Figure("inter-token p99, ms", None, True, lambda run: _at(run.inter_token_ms, "p99")),
    Figure("end to end p50, ms", None, True, lambda run: _at(run.end_to_end_ms, "p50")),
    Figure("end to end p99, ms", None, True, lambda run: _at(run.end_to_end_ms, "p99")),
    Figure("decode, ms per token", "ms/token", True, lambda run: run.decode_ms_per_token, is_optional=True),
    Figure("requests/s", "req/s", False, lambda run: _positive(run.requests_per_second)),
    Figure(
        "goodput, requests/s",
        "good",
        False,
        lambda run: run.goodput.requests_per_second if run.goodput else None,
        is_optional=True,
    ),
    Figure("input tokens/s", None, False, lambda run: _positive(run.input_tokens_per_second)),
    Figure("output tokens/s", "tokens/s", False, lambda run: _positive(run.output_tokens_per_second)),
)


def new_report(
    runs: list[Run], *, target: str, model: str, prompts: str, ignored_end_of_text: bool, cut_short: bool = False
) -> Report:
    """Return a report made now, by this Penstock."""
    return Report(
        version=penstock.__version__,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        target=target,
        model=model,
        prompts=prompts,
        ignored_end_of_text=ignored_end_of_text,
        runs=runs,
        cut_short=cut_short,
    )


def write_report(report: Report, file: Path) -> None:
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError("--json", str(file), f"it cannot be written ({error.strerror})") from error


def read_report(file: Path) -> Report:
    """Return a report that `write_report` wrote."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Report)
    except OSError as error:
        raise ConfigError("report", str(file), f"it cannot be read ({error.strerror})") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError("report", str(file), f"it was not written by `penstock bench --json`: {error}") from error
