"""Requests that hold no row yet, best first: higher priority, then earlier arrival.

A preempted request keeps its arrival, so it comes back ahead of younger ones. Bounded by the scheduler.
"""

import heapq
from collections.abc import Iterator

from penstock.engine.scheduler.request_state import RequestState


class WaitingQueue:
    """A heap with lazy removal: aborting is O(1)."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int]] = []
        self._members: dict[int, RequestState] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._members.values())

    def push(self, request: RequestState) -> None:
        self._members[request.number] = request
        heapq.heappush(self._heap, (-request.priority, request.arrival, request.number))

    def best(self) -> RequestState | None:
        """The request to admit next. Changes nothing."""
        while self._heap:
            request = self._members.get(self._heap[0][2])
            if request is not None:
                return request
            heapq.heappop(self._heap)
        return None

    def remove(self, request: RequestState) -> None:
        del self._members[request.number]
        if self._heap and self._heap[0][2] == request.number:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self._members) + 16:
            # Drop the ghosts of aborted requests once they outnumber the members.
            self._heap = [entry for entry in self._heap if entry[2] in self._members]
            heapq.heapify(self._heap)
