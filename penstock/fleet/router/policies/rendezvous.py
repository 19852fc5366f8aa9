"""Rendezvous hashing: which replica a name belongs to.

Every gateway gives the same answer without talking to another, and a replica that comes or goes moves only the names
that were or become its own.
"""

import hashlib
from collections.abc import Sequence

from penstock.fleet.replica import Replica


def ranked(name: str, candidates: Sequence[Replica]) -> list[Replica]:
    """Return the candidates, the one that the name belongs to first."""

    def weight(replica: Replica) -> bytes:
        return hashlib.blake2b(f"{name}\0{replica.url}".encode("utf-8", "replace"), digest_size=8).digest()

    return sorted(candidates, key=weight, reverse=True)
