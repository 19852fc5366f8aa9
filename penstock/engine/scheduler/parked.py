"""Requests that wait and still hold their blocks, counted by tier and tenant as they come and go.

Knows nothing of rows or blocks.
"""

from collections import Counter
from collections.abc import Iterator

from penstock.engine.scheduler.request_state import RequestState


class Parked:
    """Neither a request's tier nor its tenant changes while it is here."""

    def __init__(self) -> None:
        self._members: dict[int, RequestState] = {}
        self._num_of_tier: Counter[int] = Counter()
        self._num_of_tenant: Counter[tuple[str, int]] = Counter()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._members.values())

    def __contains__(self, request: RequestState) -> bool:
        return request.number in self._members

    def add(self, request: RequestState) -> None:
        self._members[request.number] = request
        self._count(request, 1)

    def discard(self, request: RequestState) -> None:
        if self._members.pop(request.number, None) is not None:
            self._count(request, -1)

    def num_of_tier(self, tier: int) -> int:
        return self._num_of_tier[tier]

    def num_of_tenant(self, tenant: str, tier: int) -> int:
        return self._num_of_tenant[tenant, tier]

    def _count(self, request: RequestState, change: int) -> None:
        tier = request.level[0]
        self._num_of_tier[tier] += change
        place = (request.tenant, tier)
        self._num_of_tenant[place] += change
        if not self._num_of_tenant[place]:
            del self._num_of_tenant[place]
