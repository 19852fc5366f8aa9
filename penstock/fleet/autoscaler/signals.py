"""How a fleet is doing, from what its replicas tell of themselves: counters in, rates out.

Knows nothing of HTTP or of what follows from it; time is the caller's.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from penstock.fleet.adapters.interface import Load

# What a replica said so long ago is no longer so.
_STALE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica at one look."""

    url: str
    load: Load
    load_at: float | None  # when it said so
    is_ready: bool  # it takes requests
    num_in_flight: int = 0  # requests that were sent there and have not ended, as far as the sender knows

    @property
    def num_requests(self) -> float:
        return max(self.load.num_running + self.load.num_waiting, float(self.num_in_flight))


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSignals:
    """All replicas of a model together, at one moment."""

    moment: float
    num_ready: int  # replicas that take requests
    num_coming: int = 0  # started, and not up yet
    num_warm: int = 0  # up, in the warm pool
    num_held: int = 0  # requests that wait in the gateway for a replica
    num_requests: float = 0.0  # those that replicas run or queue
    num_running: float = 0.0  # those that ready replicas run
    demand: float = 0.0  # replicas' worth of work, 1.0 being all of one device's time
    backlog_seconds: float = 0.0  # of one replica: the predicted waits of all, added up
    queue_seconds: float = 0.0  # predicted wait of a prompt that comes now, the mean over ready replicas
    kv_utilization: float = 0.0  # the mean over ready replicas
    num_kept: float = 0.0  # promises since the last look
    num_missed: float = 0.0
    prompt_tokens_per_second: float = 0.0
    generated_tokens_per_second: float = 0.0
    start_seconds: float = 0.0  # how long a replica takes from its start until it is ready

    @property
    def is_idle(self) -> bool:
        """Whether nobody asks; requests that came and went between two looks have left tokens."""
        has_requests = self.num_held or self.num_requests
        return not (has_requests or self.prompt_tokens_per_second or self.generated_tokens_per_second)


@dataclass(slots=True)
class _Known:
    """What one replica told last, and how fast its counters rose."""

    load: Load
    at: float | None
    work: float = 0.0
    prompt: float = 0.0
    generated: float = 0.0


@dataclass(slots=True)
class SignalTracker:
    """Makes the signals of one look after the other."""

    requests_per_replica: int  # what counts as a whole replica's work where a kind does not tell its own
    _known: dict[str, _Known] = field(default_factory=dict)

    def observe(
        self,
        moment: float,
        replicas: Iterable[ReplicaView],
        *,
        num_held: int,
        num_coming: int,
        start_seconds: float,
        num_warm: int = 0,
    ) -> FleetSignals:
        """Take a look. Those that are not among `replicas` any more are forgotten."""
        views = [_fresh(view, moment) for view in replicas]
        kept = missed = 0.0
        known: dict[str, _Known] = {}
        for view in views:
            before = self._known.get(view.url)
            known[view.url] = self._update(before, view)
            if before is not None and before.at is not None:
                kept += _rise(before.load.num_kept, view.load.num_kept)
                missed += _rise(before.load.num_missed, view.load.num_missed)
        self._known = known
        ready = [view.load for view in views if view.is_ready]
        num_ready = len(ready)
        backlog = sum(load.queue_seconds for load in ready)
        return FleetSignals(
            moment=moment,
            num_ready=num_ready,
            num_coming=num_coming,
            num_warm=num_warm,
            num_held=num_held,
            num_requests=sum(view.num_requests for view in views),
            num_running=sum(load.num_running for load in ready),
            demand=sum(self._work(view, known[view.url].work) for view in views),
            backlog_seconds=backlog,
            queue_seconds=backlog / num_ready if ready else 0.0,
            kv_utilization=sum(load.kv_utilization for load in ready) / num_ready if ready else 0.0,
            num_kept=kept,
            num_missed=missed,
            prompt_tokens_per_second=sum(item.prompt for item in known.values()),
            generated_tokens_per_second=sum(item.generated for item in known.values()),
            start_seconds=start_seconds,
        )

    def _work(self, view: ReplicaView, rate: float) -> float:
        if view.load.work_seconds is not None:
            return rate
        return max(view.load.kv_utilization, view.num_requests / self.requests_per_replica)

    def _update(self, before: _Known | None, view: ReplicaView) -> _Known:
        load, at = view.load, view.load_at
        if before is None or before.at is None or at is None:
            return _Known(load, at)
        seconds = at - before.at
        if seconds <= 0.0:  # it has told nothing new
            return before
        return _Known(
            load,
            at,
            work=_rise(before.load.work_seconds, load.work_seconds) / seconds,
            prompt=_rise(before.load.prompt_tokens, load.prompt_tokens) / seconds,
            generated=_rise(before.load.generated_tokens, load.generated_tokens) / seconds,
        )


def _fresh(view: ReplicaView, moment: float) -> ReplicaView:
    """A replica that has told nothing for long has told nothing."""
    is_stale = view.load_at is None or moment - view.load_at > _STALE_SECONDS
    return replace(view, load=Load(), load_at=None) if is_stale else view


def _rise(before: float | None, after: float | None) -> float:
    """How far a counter rose; one that fell began again at zero."""
    if before is None or after is None:
        return 0.0
    return after - before if after >= before else after
