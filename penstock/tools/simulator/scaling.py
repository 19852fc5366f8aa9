"""A fleet whose size changes while a workload runs in virtual time: by the gateway's autoscaler, or by a schedule.

The signals, policies and controller are the gateway's own; starting takes a stated time, and whoever goes drains. Knows
nothing of terminals or files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from penstock.fleet.autoscaler.controller import Controller
from penstock.fleet.autoscaler.policies.registry import SCALE_POLICIES
from penstock.fleet.autoscaler.signals import ReplicaView, SignalTracker
from penstock.fleet.autoscaler.start_times import StartTimes
from penstock.fleet.config import AutoscalerSection
from penstock.tools.bench.summary import ServiceLevel, summarise
from penstock.tools.bench.workload import Workload
from penstock.tools.simulator.fleet import VirtualFleet
from penstock.tools.simulator.server import SimulatedServer
from penstock.tools.simulator.simulation import Simulation, Ticks


class Scaler(Protocol):
    """Says how many replicas there should be."""

    interval_seconds: float

    def wanted(self, now: float, fleet: VirtualFleet) -> int:
        """Return how many should be there or on their way. Asked at every interval."""


class AutoscaledSize:
    """As the gateway's autoscaler would have it."""

    def __init__(self, section: AutoscalerSection) -> None:
        self.interval_seconds = section.interval_seconds
        self._controller = Controller(section, SCALE_POLICIES.load(section.policy)(section))
        self._tracker = SignalTracker(section.requests_per_replica)
        self._starts = StartTimes(section.start_seconds)
        self._wanted: int | None = None

    def wanted(self, now: float, fleet: VirtualFleet) -> int:
        num_ready, num_starting = fleet.num_ready, fleet.num_starting
        self._starts.observe(now, self._wanted or num_ready, num_ready)
        views = [
            ReplicaView(item.url, item.load, item.load_at, item.is_usable, item.num_in_flight) for item in fleet.pool
        ]
        signals = self._tracker.observe(
            now,
            views,
            num_held=fleet.num_held,
            num_coming=num_starting,
            start_seconds=self._starts.seconds,
        )
        self._wanted = self._controller.decide(signals).total
        return self._wanted


class ScheduledSize:
    """As somebody who knows the future has it: so many ready in each window, each started in time."""

    interval_seconds = 0.5

    def __init__(self, schedule: Sequence[int], window_seconds: float, start_seconds: float) -> None:
        self._schedule = schedule
        self._window_seconds = window_seconds
        self._start_seconds = start_seconds

    def wanted(self, now: float, fleet: VirtualFleet) -> int:
        coming = self._at(now + self._start_seconds)
        return max(self._at(now), coming)

    def _at(self, moment: float) -> int:
        return self._schedule[min(int(moment / self._window_seconds), len(self._schedule) - 1)]


@dataclass(frozen=True, slots=True)
class ScaledRun:
    """What a fleet of changing size did."""

    name: str
    num_requests: int
    num_within: int  # those that kept the service level
    replica_seconds: float  # from each start, before it was ready, to the end of its last request
    most_replicas: int
    ttft_p99_ms: float
    time_per_token_p99_ms: float
    work: tuple[float, ...]  # device time that tokens cost, in each second

    @property
    def attainment(self) -> float:
        return self.num_within / self.num_requests


def run_scaled(
    name: str,
    server: SimulatedServer,
    workload: Workload,
    level: ServiceLevel,
    scaler: Scaler,
    start_seconds: float,
) -> ScaledRun:
    """Run a workload on a fleet that begins with the server's number of replicas, all ready."""
    watch = _Watch(scaler.interval_seconds)

    def tick(now: float, fleet: VirtualFleet) -> None:
        resize(fleet, scaler.wanted(now, fleet), start_seconds)
        watch.look(fleet)

    simulation = Simulation(server, workload, ticks=Ticks(scaler.interval_seconds, tick))
    measured = simulation.run()
    run = summarise(workload, measured, level)
    assert run.goodput is not None, "a service level is what this is about"
    return ScaledRun(
        name=name,
        num_requests=run.num_requests,
        num_within=run.goodput.num_requests,
        replica_seconds=simulation.fleet.replica_seconds,
        most_replicas=watch.most_replicas,
        ttft_p99_ms=run.ttft_ms.p99 if run.ttft_ms is not None else 0.0,
        time_per_token_p99_ms=run.time_per_token_ms.p99 if run.time_per_token_ms is not None else 0.0,
        work=watch.work,
    )


class _Watch:
    """Notes a fleet's size and work at every tick."""

    def __init__(self, interval_seconds: float) -> None:
        self.most_replicas = 0
        self._ticks_in_second = max(1, round(1.0 / interval_seconds))
        self._totals: list[float] = []

    def look(self, fleet: VirtualFleet) -> None:
        self.most_replicas = max(self.most_replicas, len(fleet.replicas))
        self._totals.append(sum(item.stats.work_seconds for item in (*fleet.replicas, *fleet.ended)))

    @property
    def work(self) -> tuple[float, ...]:
        whole = self._totals[:: self._ticks_in_second]
        return tuple(after - before for before, after in pairwise(whole))


def resize(fleet: VirtualFleet, wanted: int, start_seconds: float) -> None:
    """Start replicas, or drain those that start or have the least to do."""
    there = [item for item in fleet.replicas if not item.is_draining]
    for _ in range(wanted - len(there)):
        fleet.start_replica(start_seconds)
    leaving = sorted(there, key=lambda item: (item.ready_at <= fleet.now, item.num_open))
    for item in leaving[: max(0, len(there) - wanted)]:
        fleet.drain_replica(item)
