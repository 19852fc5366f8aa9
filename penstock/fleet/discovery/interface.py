"""What finds replicas, and the loop that asks it."""

import asyncio
import logging
from abc import ABC, abstractmethod

from penstock.errors import RemoteError
from penstock.fleet.config import ReplicaEntry
from penstock.fleet.replica import ReplicaPool
from penstock.telemetry import log_event

log = logging.getLogger("penstock.discovery")


class Discovery(ABC):
    """One place where replicas can be looked up."""

    name: str  # of this source, unlike any other's
    refresh_seconds: float

    @abstractmethod
    async def find(self) -> list[ReplicaEntry]:
        """Return the replicas that there are now. Raises RemoteError where nobody knows."""

    async def close(self) -> None:
        """Let go of whatever it asks with."""
        return


async def follow(discovery: Discovery, pool: ReplicaPool) -> None:
    """Keep the pool as a source says, for ever. A source that fails changes nothing."""
    is_failing = False
    try:
        while True:
            try:
                pool.replace(discovery.name, await discovery.find())
                is_failing = False
            except RemoteError as error:
                if not is_failing:
                    log_event(log, f"replicas stay as they were: {error}", level=logging.ERROR, source=discovery.name)
                is_failing = True
            await asyncio.sleep(discovery.refresh_seconds)
    finally:
        await discovery.close()
