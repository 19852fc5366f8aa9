"""Rendezvous hashing: which replica a name belongs to, and when that one has enough.

Every gateway gives the same answer without talking to another, and a replica that comes or goes moves only the names
that were or become its own.
"""

import hashlib
from collections.abc import Sequence

from penstock.fleet.replica import Replica

_MAX_RATIO = 2.0  # of the mean number of requests; a replica beyond it passes names on to their next
_FREE_REQUESTS = 4.0  # below so many nobody is overloaded


def most_requests(candidates: Sequence[Replica]) -> float:
    """Return how many requests a replica may have before what belongs to it goes to others."""
    return max(_FREE_REQUESTS, _MAX_RATIO * sum(item.busyness for item in candidates) / len(candidates))


def ranked(name: str, candidates: Sequence[Replica]) -> list[Replica]:
    """Return the candidates, the one that the name belongs to first."""
    begun = hashlib.blake2b(f"{name}\0".encode("utf-8", "replace"), digest_size=8)  # once: a name may be long

    def weight(replica: Replica) -> bytes:
        ending = begun.copy()
        ending.update(replica.url.encode("utf-8", "replace"))
        return ending.digest()

    return sorted(candidates, key=weight, reverse=True)
