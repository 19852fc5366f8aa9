"""Which replicas of an application run on a Ray cluster: each says so itself, again and again.

A plain object. `penstock.deploy.ray_serve` has it live in a named actor, where `fleet.discovery.ray_listing` asks it.
Knows nothing of Ray.
"""

import time
from collections.abc import Callable

NAMESPACE = "penstock"  # of Ray's actor names


def directory_name(application: str) -> str:
    """Return the name of the actor that holds an application's directory."""
    return f"directory:{application}"


class ReplicaDirectory:
    """Begins empty, also when its actor was restarted: replicas announce themselves again before long."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: dict[str, float] = {}

    def announce(self, url: str, lease_seconds: float) -> None:
        """Take a replica in, or take that it is still there."""
        self._ends[url] = self._clock() + lease_seconds

    def withdraw(self, url: str) -> None:
        """Forget a replica that drains: it gets no new requests."""
        self._ends.pop(url, None)

    def urls(self) -> list[str]:
        """Return the replicas that were heard from in time."""
        now = self._clock()
        self._ends = {url: end for url, end in self._ends.items() if end > now}
        return sorted(self._ends)
