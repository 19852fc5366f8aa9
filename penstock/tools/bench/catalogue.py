"""The workloads that have names, so that figures from different engines and days are of the same work."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from penstock.errors import ConfigError
from penstock.tools.bench.shape import Length, Shape, exactly
from penstock.tools.bench.workload import Workload

STEADY_BATCHES = (1, 8, 64, 256)
CPU_BATCHES = (1, 4, 8, 16)
SAMPLED = 0.6  # temperature
GREEDY = 0.0


@dataclass(frozen=True, slots=True)
class Named:
    """A shape and how its requests arrive: all at once unless there is a rate or a concurrency."""

    shape: Shape
    rate: float | None = None
    concurrency: int | None = None
    temperature: float = GREEDY


def _offline(count: int, input: Length, output: Length, seed: int) -> Named:
    return Named(Shape(count, input, output, seed), temperature=SAMPLED)


def _online(
    count: int,
    *,
    seed: int,
    rate: float | None = None,
    concurrency: int | None = None,
    input: int = 1024,
    shared: int = 0,
) -> Named:
    return Named(Shape(count, exactly(input), exactly(128), seed, shared), rate, concurrency)


WORKLOADS: Mapping[str, Named] = MappingProxyType(
    {
        "mixed256": _offline(256, Length(100, 1024), Length(100, 1024), seed=0),
        "mixed256b": _offline(256, Length(100, 1024), Length(100, 1024), seed=7),
        "long_in_1000": _offline(1000, exactly(1024), exactly(128), seed=1),
        "even_1000_1000": _offline(512, exactly(1000), exactly(1000), seed=4),
        "prefill32x2048": _offline(32, exactly(2048), exactly(1), seed=2),
        **{f"first{b}": _offline(b, exactly(512), exactly(1), seed=3 + b) for b in STEADY_BATCHES},
        **{f"decode{b}": _offline(b, exactly(512), exactly(257), seed=103 + b) for b in STEADY_BATCHES},
        "rate10": _online(100, rate=10, seed=1010),
        "rate20": _online(200, rate=20, seed=1020),
        "rate30": _online(300, rate=30, seed=1030),
        "all_at_once": _online(500, seed=1000),
        "one_by_one": _online(8, concurrency=1, input=512, seed=1001),
        "shared_prefix": _online(300, rate=40, input=2048, shared=1792, seed=1040),
        **{f"cpu{b}": Named(Shape(b, exactly(125), exactly(64), seed=2000 + b)) for b in CPU_BATCHES},
    }
)


def named_workload(name: str, *, arrivals_seed: int = 0) -> Workload:
    """Return a workload by its name."""
    if name not in WORKLOADS:
        raise ConfigError("--workload", name, f"give one of: {', '.join(WORKLOADS)}")
    named = WORKLOADS[name]
    workload = Workload(
        name=name,
        requests=named.shape.requests(),
        concurrency=named.concurrency,
        temperature=named.temperature,
    )
    return workload if named.rate is None else workload.at_rate(named.rate, arrivals_seed)


def prefill_twin(name: str) -> str | None:
    """Return the workload whose time, taken from this one's, leaves the steady decoding steps alone."""
    twin = name.replace("decode", "first", 1)
    return twin if name.startswith("decode") and name in WORKLOADS else None


def steady_steps(name: str) -> int:
    """Return how many more tokens each answer of a decode workload has than its twin's."""
    twin = prefill_twin(name)
    assert twin is not None
    return WORKLOADS[name].shape.output.low - WORKLOADS[twin].shape.output.low
