"""What follows from what a replica says of itself: that it is no replica at all, or who counts its requests.

A Penstock server that shares the gateway's store and knows its keys admits and books requests itself. For any other a
gateway with keys does so, or limits would not hold. Knows nothing of how replicas are asked.
"""

import logging
import uuid
from typing import Literal

from penstock.fleet.replica import Replica
from penstock.protocol.identity import Identity
from penstock.store.key_ring import KeyRing

Counter = Literal["replica", "gateway", "nobody"]


class Introductions:
    """One gateway, as it sees those that introduce themselves."""

    def __init__(self, ring: KeyRing | None = None, store: str | None = None) -> None:
        """`store` is the identity of the gateway's own store; without one it counts nothing."""
        self.identity = Identity("gateway", instance=uuid.uuid4().hex)
        self._ring = ring
        self._store = store

    def refusal(self, identity: Identity | None) -> str | None:
        """Return why what introduces itself so can be no replica."""
        if identity is None or identity.role == "server":
            return None
        which = "this gateway itself" if identity == self.identity else "another gateway"
        return f"it is {which}, and requests would go in circles: give the URLs of servers"

    def take(self, replica: Replica, identity: Identity | None) -> None:
        """Note who counts the requests of a replica from now on."""
        replica.identity = identity
        if not replica.adapter.counts_usage:
            return
        lack = self._lack(identity) if self._counts else None
        if lack is not None and not replica.is_counted_here:
            message = (
                f"a replica cannot keep this gateway's limits: {lack}; the gateway counts its requests itself. "
                "Start it with the gateway's --store and keys to have it count them, and keep tenants apart"
            )
            replica.log.write(message, level=logging.WARNING, replica=replica.name)
        elif lack is None and replica.is_counted_here:
            replica.log.write("a replica shares this gateway's store and counts its requests", replica=replica.name)
        replica.is_counted_here = lack is not None

    def counter(self, replica: Replica) -> Counter:
        """Return who admits and books what a replica answers."""
        if replica.is_counted_here:
            return "gateway" if self._store is not None else "nobody"
        told = replica.identity
        return "replica" if told is not None and told.store is not None else "nobody"

    def store_of(self, replica: Replica) -> str:
        """Return where a replica counts, as seen from here."""
        if replica.identity is None:
            return "unknown"
        if replica.identity.store is None:
            return "none"
        return "shared" if replica.identity.store == self._store else "other"

    def heeds_asked_name(self, replica: Replica) -> bool:
        """Whether a replica leaves it to this gateway which model a caller's alias stands for.

        One on the same store believes what the gateway vouches for, and one without keys asks nobody who he is. Any
        other looks for the model's own name among those that the caller's key may use.
        """
        if not replica.adapter.counts_usage or self.store_of(replica) == "shared":
            return True
        return replica.identity is not None and not replica.identity.has_keys

    @property
    def _counts(self) -> bool:
        """Whether there are tenants whose limits this gateway could keep."""
        return self._store is not None and self._ring is not None and not self._ring.is_open

    def _lack(self, identity: Identity | None) -> str | None:
        if identity is None:
            return "it does not say which store it has"
        if identity.store is None:
            return "it has no store"
        if identity.store != self._store:
            return "it has another store"
        return None if identity.has_keys else "it takes requests without keys"
