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
from penstock.telemetry import log_event

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

    async def close(self) -> None:
        """Let go of whatever it asks with."""
        return


async def follow(discovery: Discovery, pool: ReplicaPool) -> None:
    """Keep the pool as a source says, for ever. A source that fails changes nothing; impossible ones are left out."""
    is_failing = False
    sieve = _Sieve(discovery.name, EventLog(log, pool.clock))
    try:
        while True:
            try:
                pool.replace(discovery.name, sieve.possible(await discovery.find()), discovery.why_lost)
                is_failing = False
            except RemoteError as error:
                if not is_failing:
                    log_event(log, f"replicas stay as they were: {error}", level=logging.ERROR, source=discovery.name)
                is_failing = True
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
