"""What finds replicas, and the loop that asks it."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable

from penstock.errors import ConfigError, RemoteError
from penstock.fleet.config import ReplicaEntry
from penstock.fleet.event_log import EventLog
from penstock.fleet.fleet_file import check_entry
from penstock.fleet.replica import ReplicaPool

log = logging.getLogger("penstock.discovery")


class Discovery(ABC):
    """One place where replicas can be looked up."""

    name: str  # of this source, unlike any other's
    refresh_seconds: float

    @abstractmethod
    async def find(self) -> list[ReplicaEntry]:
        """Return the replicas that are told of now, possible or not. Raises RemoteError where nobody knows."""

    def why_lost(self, url: str) -> str:
        """Return why the last `find` had no replica of this URL, for people."""
        return "it is told of no more"

    def why_none(self) -> str:
        """Return why the last `find` had no replica at all, for people."""
        return "it tells of none"

    async def close(self) -> None:
        """Let go of whatever it asks with."""
        return


async def follow(discovery: Discovery, pool: ReplicaPool) -> None:
    """Keep the pool as a source says, for ever. A source that fails changes nothing; impossible ones are left out."""
    events = EventLog(log, pool.clock)
    sieve = _Sieve(discovery.name, events)
    has_found = False
    trouble: str | None = None  # that was told, and is not over
    try:
        while True:
            before = trouble
            try:
                found = sieve.possible(await discovery.find())
                pool.replace(discovery.name, found, discovery.why_lost)
                has_found = has_found or bool(found)
                trouble = None if found else f"no replica is found: {discovery.why_none()}"
                # A fleet may sleep; one that never was there is perhaps called otherwise.
                level = logging.INFO if has_found else logging.WARNING
            except RemoteError as error:
                trouble, level = f"replicas stay as they were: {error}", logging.ERROR
            if trouble is not None and trouble != before:
                events.write(trouble, level=level, source=discovery.name)
            elif trouble is None and before is not None:
                events.write("replicas are found", source=discovery.name, replicas=len(found))
            await asyncio.sleep(discovery.refresh_seconds)
    finally:
        await discovery.close()


class _Sieve:
    """Holds back what can be no replica, and says so once for as long as it is told of."""

    def __init__(self, source: str, events: EventLog) -> None:
        self._source = source
        self._events = events
        self._told: set[str] = set()  # URLs

    def possible(self, found: Iterable[ReplicaEntry]) -> list[ReplicaEntry]:
        possible, impossible = [], set()
        for entry in found:
            try:
                check_entry(entry)
                possible.append(entry)
            except ConfigError as error:
                impossible.add(entry.url)
                if entry.url not in self._told:
                    message = f"what was found is no replica: {error}"
                    self._events.write(message, level=logging.WARNING, source=self._source)
        self._told = impossible
        return possible
