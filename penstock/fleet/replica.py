"""One server behind the gateway, and all of them together.

Holds what is known of each: models, load, standing, requests on their way. Changed by discovery, health and the proxy;
read by policies. Writes a line whenever a standing changes, and when a source finds or loses a replica. Knows nothing
of HTTP.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from penstock.fleet.adapters.interface import Load, ReplicaAdapter, ServedModel
from penstock.fleet.adapters.registry import ADAPTERS
from penstock.fleet.breaker import Breaker, Standing, StandingChange
from penstock.fleet.cached_blocks import CachedBlocks
from penstock.fleet.config import HealthSection, ReplicaEntry
from penstock.fleet.event_log import EventLog
from penstock.fleet.server_place import place_of
from penstock.protocol.identity import Identity

Clock = Callable[[], float]

_CHANGES = {
    Standing.READY: "a replica is ready",
    Standing.NOT_READY: "a replica is not ready",
    Standing.EJECTED: "a replica is ejected",
    Standing.TRIAL: "a replica is back, on trial",
}

# Lines of all replicas together that tell of who came and went: a fleet that comes at once, or one that comes and goes.
_MAX_MOVES_PER_MINUTE = 200
# Names that are remembered of replicas which have gone; about, since a replica may bring several.
_MOST_GONE_MODELS = 1000

log = logging.getLogger("penstock.gateway")


class Replica:
    """What the gateway knows of one server."""

    def __init__(
        self, entry: ReplicaEntry, health: HealthSection, clock: Clock, default_key_file: str | None = None
    ) -> None:
        self.entry = entry
        self.url = entry.url.rstrip("/")
        self.name = self.url.partition("://")[2]  # in headers, logs and metrics; no other has it
        self.adapter: ReplicaAdapter = ADAPTERS.load(entry.kind)
        # A key that opens our servers is never sent to others.
        self.key_file = entry.key_file or (default_key_file if self.adapter.counts_usage else None)
        self.breaker = Breaker(health, clock, self._tell_change)
        self.log = EventLog(log, clock)
        self.identity: Identity | None = None  # as it says itself; None where it says nothing
        # Whether this gateway admits and books its requests, because it does not do so itself.
        self.is_counted_here = not self.adapter.counts_usage
        self._models: tuple[ServedModel, ...] = ()
        self._model_names: frozenset[str] = frozenset()
        self._adapter_names: frozenset[str] = frozenset()
        self.denies_models = False  # it did not know a model that it was thought to serve: ask it again
        self.load = Load()
        self.load_at: float | None = None  # when that was so
        self.blocks: CachedBlocks | None = None  # that it says it has cached; None where it does not tell
        self.num_in_flight = 0  # requests that this gateway sent and that have not ended
        self.is_leaving = False  # gets no new requests; those it has go on
        self.is_standby = False  # kept ready by the autoscaler, and sent nothing until it is needed
        self.clock = clock
        self._full_until = 0.0

    @property
    def models(self) -> tuple[ServedModel, ...]:
        return self._models

    @models.setter
    def models(self, models: tuple[ServedModel, ...]) -> None:
        self._models = models
        self.denies_models = False
        self._model_names = frozenset(model.name for model in models)
        self._adapter_names = frozenset(model.name for model in models if model.is_adapter)

    @property
    def version(self) -> str:
        return self.entry.version

    @property
    def is_usable(self) -> bool:
        return not (self.is_leaving or self.is_standby) and self.breaker.admits(self.num_in_flight)

    @property
    def is_up(self) -> bool:
        """Whether it is there at all, be it on trial and taken."""
        return not self.is_leaving and self.breaker.standing in (Standing.READY, Standing.TRIAL)

    @property
    def is_full(self) -> bool:
        limit = self.entry.max_in_flight
        if limit is not None and self.num_in_flight >= limit:
            return True
        return self._full_until > 0.0 and self.clock() < self._full_until

    @property
    def seconds_until_free(self) -> float:
        """How long it will count as full for having said so; 0 where only a request's end can help."""
        return max(0.0, self._full_until - self.clock())

    @property
    def busyness(self) -> float:
        """Requests it has: those it told of or, where we sent more since, ours."""
        return max(self.load.num_running + self.load.num_waiting, float(self.num_in_flight))

    def is_same_server(self, entry: ReplicaEntry) -> bool:
        """Whether an entry for the same place is of a server that is spoken to as this one is."""
        return (entry.kind, entry.key_file) == (self.entry.kind, self.entry.key_file)

    def serves(self, model: str) -> bool:
        return model in self._model_names

    def has_adapter(self, name: str) -> bool:
        """Whether it serves an adapter under this model's name."""
        return name in self._adapter_names

    def note_load(self, load: Load | None) -> None:
        """Take what it says of its load; None: nothing that could be read."""
        self.load, self.load_at = (Load(), None) if load is None else (load, self.clock())

    def _tell_change(self, change: StandingChange) -> None:
        values: dict[str, object] = {"replica": self.name, "reason": change.reason}
        if change.wait_seconds is not None:
            values |= {"wait_seconds": change.wait_seconds, "ejections": self.breaker.num_ejections}
        if change.before is not Standing.UNKNOWN:
            values |= {"before": change.before.value, "before_seconds": round(change.seconds, 3)}
        is_bad = change.now in (Standing.EJECTED, Standing.NOT_READY)
        self.log.write(_CHANGES[change.now], level=logging.WARNING if is_bad else logging.INFO, **values)

    def note_full(self, seconds: float) -> None:
        """It refused a request for being full, and said when to come again."""
        self._full_until = self.clock() + seconds


def _not_told_of(url: str) -> str:
    return "its source tells of it no more"


class ReplicaPool:
    """All replicas by their place. A replica may be known to several sources, and goes when the last lets go of it.

    What it is, its kind and version for example, is the word of the source that has known it longest.
    """

    def __init__(
        self, health: HealthSection, clock: Clock = time.monotonic, *, default_key_file: str | None = None
    ) -> None:
        self.health = health
        self.clock = clock
        self._default_key_file = default_key_file
        self.added = asyncio.Event()  # set when there is a replica that nobody has asked yet
        self._replicas: dict[str, Replica] = {}
        self._sources: dict[str, list[str]] = {}  # by place, who has known it longest first
        self._leaving: list[Replica] = []
        self.gone_models: set[str] = set()  # that replicas served which have gone
        self._moves = EventLog(log, clock, max_per_minute=_MAX_MOVES_PER_MINUTE)

    def __iter__(self) -> Iterator[Replica]:
        return iter(list(self._replicas.values()))

    def __len__(self) -> int:
        return len(self._replicas)

    def find(self, url: str) -> Replica | None:
        return self._replicas.get(place_of(url))

    def replace(
        self, source: str, entries: Iterable[ReplicaEntry], why_lost: Callable[[str], str] = _not_told_of
    ) -> None:
        """Take these replicas for all those that `source` knew before. `why_lost` says, of a URL, why it is gone."""
        wanted = {place_of(entry.url): entry for entry in entries}
        for entry in wanted.values():
            self.add(source, entry)
        for place in [place for place, sources in self._sources.items() if source in sources and place not in wanted]:
            self.remove(source, place, why_lost(self._replicas[place].url))

    def add(self, source: str, entry: ReplicaEntry) -> Replica:
        """Take a replica in, or what its source says of it now; return it."""
        place = place_of(entry.url)
        sources = self._sources.setdefault(place, [])
        is_found = source not in sources
        if is_found:
            sources.append(source)
        replica = self._replicas.get(place)
        if replica is not None and sources[0] != source:
            if is_found:
                self._tell_found(replica, source, sources)
            return replica
        if replica is None or not replica.is_same_server(entry):
            if replica is not None:
                self._tell_lost(replica, source, "its kind or key_file has changed: it is taken for another", ())
                self._see_off(replica)
            replica = self._replicas[place] = Replica(entry, self.health, self.clock, self._default_key_file)
            self._tell_found(replica, source, sources)
            self.added.set()
        else:
            replica.entry = entry
        return replica

    def remove(self, source: str, url: str, reason: str) -> bool:
        """Let go of a replica; return whether the source knew it. Requests that it has go on.

        `reason` is for people: why the source does not know it any more.
        """
        place = place_of(url)
        sources = self._sources.get(place, [])
        if source not in sources:
            return False
        sources.remove(source)
        self._tell_lost(self._replicas[place], source, reason, sources)
        if not sources:
            self._see_off(self._replicas.pop(place))
            del self._sources[place]
        return True

    def _tell_found(self, replica: Replica, source: str, sources: Sequence[str]) -> None:
        others = [item for item in sources if item != source]
        also = {"also_known_to": ", ".join(others)} if others else {}
        self._moves.write("a replica was found", level=logging.INFO, replica=replica.name, source=source, **also)

    def _tell_lost(self, replica: Replica, source: str, reason: str, others: Sequence[str]) -> None:
        message = "a replica was lost"
        rest: dict[str, Any] = {"open_requests": replica.num_in_flight}
        if others:
            message, rest = f"{message} by one source, others know it", {"known_to": ", ".join(others)}
        self._moves.write(message, level=logging.INFO, replica=replica.name, source=source, reason=reason, **rest)

    @property
    def leaving(self) -> list[Replica]:
        """Those that no source knows any more, and that still have requests of this gateway."""
        self._leaving = [replica for replica in self._leaving if replica.num_in_flight]
        return list(self._leaving)

    def _see_off(self, replica: Replica) -> None:
        replica.is_leaving = True
        if len(self.gone_models) < _MOST_GONE_MODELS:
            self.gone_models.update(model.name for model in replica.models)
        self._leaving = [*self.leaving, replica]

    def serving(self, model: str) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.serves(model)]

    def has_substitute(self, replica: Replica) -> bool:
        """Whether another that may be sent requests serves each model of this one."""
        others = [[other for other in self.serving(model.name) if other is not replica] for model in replica.models]
        return bool(others) and all(any(other.is_usable for other in group) for group in others)

    def is_needed(self, replica: Replica) -> bool:
        """Whether fewer than half are up of those that serve a model of this replica; of all, where it told none."""
        groups = [self.serving(model.name) for model in replica.models] or [list(self._replicas.values())]
        return any(2 * sum(other.is_up for other in group) < len(group) for group in groups)

    def models(self) -> dict[str, ServedModel]:
        """Every model that a replica which is up serves, with the smallest of their contexts."""
        found: dict[str, ServedModel] = {}
        for replica in self._replicas.values():
            for model in replica.models if replica.is_up else ():
                known = found.get(model.name)
                limits = [
                    item.max_context_tokens for item in (known, model) if item and item.max_context_tokens is not None
                ]
                found[model.name] = ServedModel(model.name, min(limits, default=None))
        return found
