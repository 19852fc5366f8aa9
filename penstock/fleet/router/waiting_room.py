"""Where requests for one model wait while no replica can take them: bounded per tenant, fair between tenants.

Who waits is served by priority, then tenants in turn, then of one tenant's the nearest deadline, then arrival; who
cannot use what there is holds up nobody behind. Knows nothing of replicas: what it hands out is whatever `place` gives.
"""

import asyncio
import bisect
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
W = TypeVar("W", bound=Hashable)

# Of those who are before a newcomer, for what they want: all where they are so few, else the first of some tenants'.
_MAX_LOOKED_AT = 64


class RoomFull(Exception):
    """The tenant has as many requests waiting as it may."""


@dataclass(eq=False, slots=True)
class _Ticket(Generic[T, W]):
    place: Callable[[], T | None]
    given: "asyncio.Future[T]"
    latest: float  # when it is worth nothing any more
    want: W

    def urgency(self) -> float:
        return self.latest


class WaitingRoom(Generic[T, W]):
    def __init__(self, max_per_tenant: int) -> None:
        self._max_per_tenant = max_per_tenant
        # By priority, the highest served first; tenants of one priority in the order of their turns.
        self._queues: dict[int, dict[str, list[_Ticket[T, W]]]] = {}
        self._wants: Counter[W] = Counter()  # of those who wait
        self._wants_by_priority: dict[int, Counter[W]] = {}

    def __len__(self) -> int:
        return self._wants.total()

    @property
    def wants(self) -> Counter[W]:
        """What those who wait want, and how many of them each."""
        return self._wants

    def wants_before(self, tenant: str, priority: int, latest: float | None = None) -> dict[W, float]:
        """Return what those want, and how many of them each, who are served before one of a tenant who comes now.

        All of higher priorities; of its own tenant whoever's `latest` is not later, and of each other tenant as many,
        or one more where that one's turn comes first. That is so if nobody else comes or leaves, and all can use what
        there is. Their number is exact; where many wait, the wants of some stand for those of all.
        """
        before: dict[W, float] = {}
        for other, wants in self._wants_by_priority.items():
            if other > priority:
                _add(before, wants)
        tenants = self._queues.get(priority)
        if tenants:
            _add(before, self._wants_in_turn(tenants, tenant, priority, math.inf if latest is None else latest))
        return before

    def _wants_in_turn(
        self, tenants: dict[str, list[_Ticket[T, W]]], tenant: str, priority: int, latest: float
    ) -> Mapping[W, float]:
        """Return those of one priority who are served before one of a tenant who comes now."""
        num_own = bisect.bisect_right(tenants.get(tenant, ()), latest, key=_Ticket.urgency)
        queues = list(tenants.values())
        own_turn = list(tenants).index(tenant) if tenant in tenants else len(queues)
        most = num_own + 1
        numbers = [number if (number := len(queue)) < most else most for queue in queues[:own_turn]]
        numbers += [number if (number := len(queue)) < num_own else num_own for queue in queues[own_turn:]]
        wants = self._wants_by_priority[priority]
        if len(wants) == 1:
            return dict.fromkeys(wants, sum(numbers))
        stride = math.ceil(len(queues) / _MAX_LOOKED_AT)
        sample = [item for item in zip(queues[::stride], numbers[::stride], strict=True) if item[1]]
        if not sample:
            return {}
        most_of_each = _MAX_LOOKED_AT // len(sample)
        scale = sum(numbers) / sum(number for _, number in sample)
        found: dict[W, float] = {}
        for queue, number in sample:
            looked_at = queue[: min(number, most_of_each)]
            for ticket in looked_at:
                found[ticket.want] = found.get(ticket.want, 0.0) + scale * number / len(looked_at)
        return found

    async def enter(
        self,
        tenant: str,
        priority: int,
        seconds: float,
        place: Callable[[], T | None],
        give_back: Callable[[T], None],
        *,
        latest: float | None = None,
        want: W,
    ) -> T:
        """Return what `place` gives as soon as it gives something and it is this request's turn.

        `latest` is the moment, on whatever clock, at which a place is worth nothing any more. Those of one `want` can
        use the same: where `place` has nothing for one of them, the others are not asked. Raises RoomFull, or
        TimeoutError after so many seconds. What came too late is given back.
        """
        if sum(len(tenants.get(tenant, ())) for tenants in self._queues.values()) >= self._max_per_tenant:
            raise RoomFull
        given: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        ticket = _Ticket(place, given, math.inf if latest is None else latest, want)
        queue = self._queues.setdefault(priority, {}).setdefault(tenant, [])
        bisect.insort(queue, ticket, key=_Ticket.urgency)
        self._wants[want] += 1
        self._wants_by_priority.setdefault(priority, Counter())[want] += 1
        self.call_next()
        try:
            async with asyncio.timeout(seconds):
                return await given
        except BaseException:
            if given.done() and not given.cancelled():
                give_back(given.result())
            raise
        finally:
            self._remove(priority, tenant, ticket)

    def call_next(self) -> bool:
        """Give out what there is; return whether anybody got something. Call it whenever something may be free."""
        refused: set[W] = set()
        has_served = False
        for priority in sorted(self._queues, reverse=True):
            while self._serve_one(priority, refused):
                has_served = True
        return has_served

    def _serve_one(self, priority: int, refused: set[W]) -> bool:
        """Serve the first of a priority who can be; add to `refused` what there is nothing for."""
        for tenant, queue in self._queues.get(priority, {}).items():
            for ticket in queue:
                if len(refused) == len(self._wants):
                    return False
                if ticket.want in refused or ticket.given.done():  # done: its caller has left
                    continue
                given = ticket.place()
                if given is None:
                    refused.add(ticket.want)
                    continue
                ticket.given.set_result(given)
                self._remove(priority, tenant, ticket)
                tenants = self._queues.get(priority, {})
                if tenant in tenants:
                    tenants[tenant] = tenants.pop(tenant)  # behind the others
                return True
        return False

    def _remove(self, priority: int, tenant: str, ticket: _Ticket[T, W]) -> None:
        """Let go of a ticket, if that was not done."""
        queue = self._queues.get(priority, {}).get(tenant, [])
        if ticket not in queue:
            return
        queue.remove(ticket)
        for wants in (self._wants, self._wants_by_priority[priority]):
            wants[ticket.want] -= 1
            if not wants[ticket.want]:
                del wants[ticket.want]
        if not queue:
            del self._queues[priority][tenant]
        if not self._queues[priority]:
            del self._queues[priority], self._wants_by_priority[priority]


def _add(total: dict[W, float], wants: Mapping[W, float]) -> None:
    for want, count in wants.items():
        total[want] = total.get(want, 0.0) + count
