"""Replicas that register themselves, and stay for as long as they go on saying so.

Knows nothing of how they say it.
"""

import asyncio

from penstock.fleet.config import ReplicaEntry
from penstock.fleet.replica import ReplicaPool
from penstock.fleet.server_place import place_of

_SOURCE = "registration"


class Registration:
    def __init__(self, pool: ReplicaPool, lease_seconds: float) -> None:
        self.lease_seconds = lease_seconds
        self._pool = pool
        self._ends: dict[str, float] = {}

    def register(self, entry: ReplicaEntry) -> None:
        """Take a replica in, or take that it is still there."""
        self._ends[place_of(entry.url)] = self._pool.clock() + self.lease_seconds
        self._pool.add(_SOURCE, entry)

    def leave(self, url: str, reason: str = "its registration was taken back") -> bool:
        """Send it nothing more; what it has goes on. Returns whether it had registered."""
        self._ends.pop(place_of(url), None)
        return self._pool.remove(_SOURCE, url, reason)

    def expire(self) -> None:
        """Let go of those that have not been heard from."""
        now = self._pool.clock()
        for url in [url for url, end in self._ends.items() if end <= now]:
            self.leave(url, f"it was not heard from for {self.lease_seconds:g} s")

    async def run(self) -> None:
        while True:
            self.expire()
            await asyncio.sleep(min(1.0, self.lease_seconds / 4))
