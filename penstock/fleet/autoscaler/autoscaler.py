"""One model's autoscaler at work: looks at the replicas, asks the controller, and has the backend do it.

Keeps what it decided and why. Which replicas take requests and which stand by is marked in the pool; replicas of the
model that the backend does not own, such as a candidate's, are neither counted nor marked.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping

import msgspec

from penstock.errors import RemoteError
from penstock.fleet.autoscaler.backends.interface import Failure, ScaleBackend, Trouble
from penstock.fleet.autoscaler.controller import Controller, ScaleDecision
from penstock.fleet.autoscaler.policies.registry import SCALE_POLICIES
from penstock.fleet.autoscaler.signals import FleetSignals, ReplicaView, SignalTracker
from penstock.fleet.autoscaler.start_times import StartTimes
from penstock.fleet.config import AutoscalerSection
from penstock.fleet.replica import Replica, ReplicaPool
from penstock.telemetry import log_event

_MAX_KEPT = 100
_POLL_SECONDS = 0.05
# What reckoning with figures that make no sense raises: replicas tell what they like.
_POLICY_ERRORS = (ArithmeticError, LookupError, TypeError, ValueError)

log = logging.getLogger("penstock.autoscaler")


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One time that another number was wanted."""

    moment: float
    before: int
    after: int
    reason: str


class _PolicyFailed(Exception):
    """A policy made nothing of what it was told."""


class Autoscaler:
    def __init__(
        self,
        model: str,
        section: AutoscalerSection,
        backend: ScaleBackend,
        pool: ReplicaPool,
        *,
        num_held: Callable[[], int],
        on_change: Callable[[], None],
        on_trouble: Callable[[str | None], None],
    ) -> None:
        self.model = model
        self.section = section
        self.changes: deque[Change] = deque(maxlen=_MAX_KEPT)
        self.num_rises = 0
        self.num_falls = 0
        self.signals: FleetSignals | None = None
        self.decision: ScaleDecision | None = None
        self.failure: str | None = None  # why the backend could not be asked, or why what it started does not come
        self._backend = backend
        self._pool = pool
        self._num_held = num_held  # requests in the gateway that wait for this model
        self._on_change = on_change  # other replicas take requests now
        self._on_trouble = on_trouble  # is told why replicas do not come, as far as callers may know; None: they do
        self._controller = Controller(section, SCALE_POLICIES.load(section.policy)(section))
        self._tracker = SignalTracker(section.requests_per_replica)
        self._starts = StartTimes(section.start_seconds)
        self._marked: list[Replica] = []
        self._failed_looks: Counter[Failure] = Counter()

    @property
    def num_failures(self) -> Mapping[Failure, int]:
        """How often what went wrong: the replicas that did not start, and of everything else the looks that met it."""
        looks = {failure: self._failed_looks[failure] for failure in Failure}
        return {**looks, Failure.START_FAILED: self._backend.num_failed_starts}

    async def run(self) -> None:
        """Look and act for ever."""
        while True:
            await self.step()
            await self._pause()

    async def step(self) -> None:
        """Look and act once. What fails is tried again the next time."""
        replicas = [item for item in self._pool.serving(self.model) if self._backend.owns(item)]
        try:
            num_there = await self._backend.count()
            decision = self._decide(replicas, num_there)
            self._mark(replicas, decision.desired)
            await self._backend.scale_to(decision.total, self._leaving(replicas))
            trouble = self._backend.trouble
        except RemoteError as error:
            trouble = Trouble("the autoscaler cannot have one started", str(error), Failure.BACKEND_REFUSED)
        except _PolicyFailed as error:
            summary = "the autoscaler cannot tell how many there should be"
            trouble = Trouble(summary, str(error), Failure.POLICY_ERROR)
        self._note(trouble)

    def _note(self, trouble: Trouble | None) -> None:
        if trouble is not None:
            self._failed_looks[trouble.failure] += 1
        if trouble is not None and self.failure is None:
            log_event(log, f"the fleet stays as it is: {trouble}", level=logging.ERROR, model=self.model)
        self.failure = str(trouble) if trouble is not None else None
        self._on_trouble(trouble.summary if trouble is not None else None)

    async def close(self) -> None:
        await self._backend.close()

    def _decide(self, replicas: list[Replica], num_there: int) -> ScaleDecision:
        now = self._pool.clock()
        views = [
            ReplicaView(item.url, item.load, item.load_at, item.is_up and not item.is_standby, item.num_in_flight)
            for item in replicas
        ]
        num_up = sum(item.is_up for item in replicas)
        self._starts.observe(now, self.decision.total if self.decision is not None else num_there, num_up)
        self.signals = self._tracker.observe(
            now,
            views,
            num_held=self._num_held(),
            num_coming=max(0, num_there - num_up),
            num_warm=num_up - sum(view.is_ready for view in views),
            start_seconds=self._starts.seconds,
        )
        try:
            decision = self._controller.decide(self.signals)
        except _POLICY_ERRORS as error:
            raise _PolicyFailed(f"{self.section.policy} failed with {type(error).__name__}: {error}") from error
        before = self.decision.total if self.decision is not None else num_there
        if decision.total != before:
            change = Change(moment=now, before=before, after=decision.total, reason=decision.reason)
            self.changes.append(change)
            self.num_rises += decision.total > before
            self.num_falls += decision.total < before
            log_event(log, f"{before} to {decision.total} replicas: {decision.reason}", model=self.model)
        self.decision = decision
        return decision

    def _mark(self, replicas: list[Replica], desired: int) -> None:
        """Have so many of those that are up take requests: who does already goes on, the busiest first."""
        for replica in self._marked:
            if replica not in replicas:
                replica.is_standby = False  # it serves another model now, or is somebody else's
        self._marked = replicas
        up = [item for item in replicas if item.is_up]
        up.sort(key=lambda item: (item.is_standby, -item.num_in_flight, item.url))
        woken = [item for item in up[:desired] if item.is_standby]
        for place, replica in enumerate(up):
            replica.is_standby = place >= desired
        if woken:
            self._on_change()

    def _leaving(self, replicas: list[Replica]) -> list[str]:
        """Those that stand by, the least busy first."""
        standing_by = [item for item in replicas if item.is_standby]
        return [item.url for item in sorted(standing_by, key=lambda item: item.num_in_flight)]

    async def _pause(self) -> None:
        """Wait for the next look, which is at once when a request comes while there is nothing."""
        ends = self._pool.clock() + self.section.interval_seconds
        await asyncio.sleep(0)  # however short it is, others have their turn
        while self._pool.clock() < ends:
            if self._num_held() and self.decision is not None and self.decision.desired == 0:
                return
            await asyncio.sleep(min(_POLL_SECONDS, self.section.interval_seconds))
