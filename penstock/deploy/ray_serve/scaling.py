"""Our autoscaler's controller as a Ray Serve autoscaling policy: looks at what the replicas tell, says how many.

Runs in Serve's controller process. Knows nothing of how replicas are started. Requests that a gateway holds are not
seen from there, so that it never goes down to none; a gateway's own autoscaler (backend `ray`) does.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.fleet.adapters.interface import Load
from penstock.fleet.autoscaler.controller import Controller, ScaleDecision
from penstock.fleet.autoscaler.policies.registry import SCALE_POLICIES
from penstock.fleet.autoscaler.signals import FleetSignals, ReplicaView, SignalTracker
from penstock.fleet.autoscaler.start_times import StartTimes
from penstock.fleet.config import AutoscalerSection

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

_LOAD_FIELDS = frozenset(item.name for item in dataclasses.fields(Load))


class ControllerPolicy:
    """Made once by Serve with the settings of `[autoscaler.MODEL]`, then called at every turn of its loop."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, **settings: Any) -> None:
        self._section = msgspec.convert({"backend": {}, **settings}, AutoscalerSection)
        self._clock = clock
        self._controller = Controller(self._section, SCALE_POLICIES.load(self._section.policy)(self._section))
        self._tracker = SignalTracker(self._section.requests_per_replica)
        self._starts = StartTimes(self._section.start_seconds)
        self._decision: ScaleDecision | None = None
        self._next_look = 0.0

    def __call__(self, context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
        """Return how many replicas there should be, and why for whoever reads Serve's state."""
        now = self._clock()
        if self._decision is None or now >= self._next_look:
            self._next_look = now + self._section.interval_seconds
            self._decision = self._controller.decide(self._look(now, context))
        return self._decision.total, {"reason": self._decision.reason}

    def _look(self, now: float, context: "AutoscalingContext") -> FleetSignals:
        num_there, target = context.current_num_replicas, context.target_num_replicas
        self._starts.observe(now, target, num_there)
        return self._tracker.observe(
            now,
            replica_views(context.raw_metrics or {}),
            num_held=round(context.total_queued_requests or 0),
            num_coming=max(0, target - num_there),
            start_seconds=self._starts.seconds,
        )


def replica_views(metrics: Mapping[str, Mapping[Any, Any]]) -> list[ReplicaView]:
    """Return each replica as it told of itself last. `metrics`: name, then replica, then values with their times."""
    loads: dict[Any, dict[str, float]] = {}
    times: dict[Any, float] = {}
    for name, series_of in metrics.items():
        for replica, series in series_of.items():
            if name in _LOAD_FIELDS and series:
                loads.setdefault(replica, {})[name] = series[-1].value
                times[replica] = series[-1].timestamp
    return [ReplicaView(str(replica), Load(**load), times[replica], True) for replica, load in loads.items()]
