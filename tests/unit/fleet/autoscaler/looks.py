"""Sections, signals and fleets for autoscalers without replicas."""

import math
from collections.abc import Collection

from penstock.fleet.autoscaler.backends.interface import ScaleBackend
from penstock.fleet.autoscaler.controller import Controller, ScaleDecision
from penstock.fleet.autoscaler.policies.registry import SCALE_POLICIES
from penstock.fleet.autoscaler.signals import FleetSignals
from penstock.fleet.config import AutoscalerSection


def section(**fields) -> AutoscalerSection:
    return AutoscalerSection(
        **{
            "backend": {"kind": "external"}, "interval_seconds": 1.0, "scale_down_seconds": 10.0,
            "idle_seconds": 20.0, "start_seconds": 5.0, "max_replicas": 10,
            "target_utilization": 0.75, **fields,
        }
    )  # fmt: skip


def look(moment: float = 0.0, num_ready: int = 1, **fields) -> FleetSignals:
    values = {"num_requests": 1.0, "start_seconds": 5.0, **fields}
    return FleetSignals(moment=moment, num_ready=num_ready, **values)


class FluidFleet:
    """Replicas as buckets: so much work comes each second, a ready one does at most a second's worth of it."""

    def __init__(self, section: AutoscalerSection, num_ready: int = 1, start_seconds: float = 5.0) -> None:
        policy = SCALE_POLICIES.load(section.policy)(section)
        self.controller = Controller(section, policy)
        self.start_seconds = start_seconds
        self.moment = 0.0
        self.backlog = 0.0
        self.ready = num_ready
        self.coming: list[float] = []  # when each is ready
        self.decisions: list[ScaleDecision] = []

    @property
    def total(self) -> int:
        return self.ready + len(self.coming)

    def second(self, load: float) -> ScaleDecision:
        """Let a second pass under so much load, in replicas' worth of work."""
        self.moment += 1.0
        self.ready += sum(moment <= self.moment for moment in self.coming)
        self.coming = [moment for moment in self.coming if moment > self.moment]
        self.backlog += load
        done = min(self.backlog, float(self.ready))
        self.backlog -= done
        decision = self.controller.decide(
            look(
                self.moment,
                self.ready,
                num_coming=len(self.coming),
                num_requests=float(math.ceil(self.backlog + done)) if self.ready else 0.0,
                num_held=0 if self.ready else math.ceil(self.backlog),
                demand=done,
                backlog_seconds=self.backlog if self.ready else 0.0,
                queue_seconds=self.backlog / self.ready if self.ready else 0.0,
                start_seconds=self.start_seconds,
            )
        )
        self._apply(decision.total)
        self.decisions.append(decision)
        return decision

    def _apply(self, total: int) -> None:
        self.coming += [self.moment + self.start_seconds] * max(0, total - self.total)
        while self.total > total:
            if self.coming:
                self.coming.pop()
            else:
                self.ready -= 1


class FakeBackend(ScaleBackend):
    """Remembers what it was told."""

    def __init__(self, count: int = 0) -> None:
        self.number = count
        self.told: list[tuple[int, list[str]]] = []
        self.error: Exception | None = None
        self.is_closed = False

    async def count(self) -> int:
        if self.error is not None:
            raise self.error
        return self.number

    async def scale_to(self, count: int, leave_first: Collection[str] = ()) -> None:
        self.told.append((count, list(leave_first)))
        self.number = count

    async def close(self) -> None:
        self.is_closed = True
