"""From what a person typed to the workloads that will run."""

from dataclasses import dataclass, replace
from pathlib import Path

from penstock.errors import ConfigError
from penstock.tools.bench.catalogue import named_workload
from penstock.tools.bench.offline_bench import with_prefill_twins
from penstock.tools.bench.shape import parse_shape
from penstock.tools.bench.trace import read_trace
from penstock.tools.bench.workload import Workload, sweep_suffix

# Between two runs of a sweep: far enough that no run meets tokens which another left in a prefix cache.
SWEEP_SHIFT = 1009


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Which requests: one of `names`, `shape` and `trace`."""

    names: str | None = None
    shape: str | None = None
    shared_tokens: int = 0
    trace: Path | None = None
    speed: float = 1.0
    limit: int | None = None
    seed: int = 0
    temperature: float | None = None  # None: the workload's own

    def workloads(self) -> list[Workload]:
        """Return the workloads as they arrive by themselves."""
        if sum(item is not None for item in (self.names, self.shape, self.trace)) != 1:
            raise ConfigError("--workload", self.names, "give one of --workload, --shape or --trace, and only one")
        if self.shared_tokens and self.shape is None:
            raise ConfigError("--shared-tokens", self.shared_tokens, "leave it out, or give --shape too")
        if self.speed != 1.0 and self.trace is None:
            raise ConfigError("--speed", self.speed, "leave it out, or give --trace too")
        chosen = [item.shifted(self.seed) for item in self._read()]
        if self.limit is not None:
            chosen = [item.limited(self.limit) for item in chosen]
        if self.temperature is not None:
            chosen = [replace(item, temperature=self.temperature) for item in chosen]
        return chosen

    def offline_workloads(self) -> list[Workload]:
        """Return the workloads for one engine; decode workloads bring the twin that they are compared with."""
        if self.names is None:
            return self.workloads()
        return replace(self, names=",".join(with_prefill_twins(split("--workload", self.names)))).workloads()

    def _read(self) -> list[Workload]:
        if self.names is not None:
            return [named_workload(name, arrivals_seed=self.seed) for name in split("--workload", self.names)]
        if self.shape is not None:
            shape = parse_shape(self.shape, shared=self.shared_tokens)
            return [Workload(name=self.shape, requests=shape.requests())]
        assert self.trace is not None
        return [read_trace(self.trace, self.limit).faster(_positive("--speed", self.speed))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """How requests arrive, where it is not as the workload says: one of these at most."""

    rate: float | None = None
    rates: str | None = None
    concurrency: int | None = None
    seed: int = 0

    @property
    def given(self) -> list[str]:
        """The options by which requests do not arrive as the workload says."""
        options = {"--rate": self.rate, "--rates": self.rates, "--concurrency": self.concurrency}
        return [name for name, value in options.items() if value is not None]

    def workloads(self, work: Work) -> list[Workload]:
        """Return the workloads as they are to arrive."""
        if work.speed != 1.0 and self.given:
            right = f"leave it out: {self.given[0]} replaces the times of the trace"
            raise ConfigError("--speed", work.speed, right)
        return self.apply(work.workloads())

    def apply(self, workloads: list[Workload]) -> list[Workload]:
        if len(self.given) > 1:
            raise ConfigError("--rate", self.rate, "give one of --rate, --rates or --concurrency, and only one")
        if self.concurrency is not None:
            return [item.in_closed_loop(self.concurrency) for item in workloads]
        if self.rate is not None:
            return [item.at_rate(_positive("--rate", self.rate), self.seed) for item in workloads]
        if self.rates is not None:
            rates = [_positive("--rates", part) for part in split("--rates", self.rates)]
            return [step for item in workloads for step in sweep(item, rates, self.seed)]
        return workloads


def sweep(workload: Workload, rates: list[float], seed: int = 0) -> list[Workload]:
    """Return the workload once at each rate, each time of tokens not seen before."""
    return [
        replace(workload.at_rate(rate, seed), name=workload.name + sweep_suffix(rate)).shifted(index * SWEEP_SHIFT)
        for index, rate in enumerate(rates)
    ]


def split(option: str, text: str) -> list[str]:
    """Return the parts of an option's list with commas."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigError(option, text, "give one or more, with commas between them")
    return parts


def _positive(option: str, value: float | str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(option, value, "give a number over 0")
    return number
