"""Where requests for one model wait while no replica can take them: bounded per tenant, fair between tenants.

Who waits is served by priority, then tenants in turn, then of one tenant's the nearest deadline, then arrival. Knows
nothing of replicas: what it hands out is whatever `place` gives.
"""

import asyncio
import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class RoomFull(Exception):
    """The tenant has as many requests waiting as it may."""


@dataclass(eq=False, slots=True)
class _Ticket(Generic[T]):
    place: Callable[[], T | None]
    given: "asyncio.Future[T]"
    latest: float  # when it is worth nothing any more

    def urgency(self) -> float:
        return self.latest


class WaitingRoom(Generic[T]):
    def __init__(self, max_per_tenant: int) -> None:
        self._max_per_tenant = max_per_tenant
        # By priority, the highest served first; tenants of one priority in the order of their turns.
        self._queues: dict[int, dict[str, list[_Ticket[T]]]] = {}

    def __len__(self) -> int:
        return sum(len(queue) for tenants in self._queues.values() for queue in tenants.values())

    async def enter(
        self,
        tenant: str,
        priority: int,
        seconds: float,
        place: Callable[[], T | None],
        give_back: Callable[[T], None],
        *,
        latest: float | None = None,
    ) -> T:
        """Return what `place` gives as soon as it gives something and it is this request's turn.

        `latest` is the moment, on whatever clock, at which a place is worth nothing any more. Raises RoomFull, or
        TimeoutError after so many seconds. What came too late is given back.
        """
        given: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        ticket = _Ticket(place, given, math.inf if latest is None else latest)
        tenants = self._queues.setdefault(priority, {})
        if sum(len(queues.get(tenant, ())) for queues in self._queues.values()) >= self._max_per_tenant:
            raise RoomFull
        bisect.insort(tenants.setdefault(tenant, []), ticket, key=_Ticket.urgency)
        self.call_next()
        try:
            async with asyncio.timeout(seconds):
                return await given
        except BaseException:
            if ticket.given.done() and not ticket.given.cancelled():
                give_back(ticket.given.result())
            raise
        finally:
            self._forget(priority, tenant, ticket)

    def call_next(self) -> None:
        """Give out what there is. Call it whenever something may have become free."""
        for priority in sorted(self._queues, reverse=True):
            tenants = self._queues[priority]
            while tenants:
                tenant = next(iter(tenants))
                queue = tenants[tenant]
                ticket = queue[0]
                given = None if ticket.given.done() else ticket.place()
                if given is None and not ticket.given.done():
                    return  # nobody behind can be served either
                del queue[0]
                del tenants[tenant]
                if queue:
                    tenants[tenant] = queue  # behind the others
                if given is not None:
                    ticket.given.set_result(given)

    def _forget(self, priority: int, tenant: str, ticket: _Ticket[T]) -> None:
        queue = self._queues.get(priority, {}).get(tenant)
        if queue is not None and ticket in queue:
            queue.remove(ticket)
            if not queue:
                del self._queues[priority][tenant]
        if not self._queues.get(priority, True):
            del self._queues[priority]
