"""What is to happen in virtual time, in its order. Knows nothing of what that is."""

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Agenda:
    """Actions at moments. `now` is the moment of the last one that was run."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Action]] = []
        self._num_added = 0

    def add(self, moment: float, action: Action) -> None:
        """Have something done; what is due at one moment is done in the order in which it was added."""
        heapq.heappush(self._heap, (moment, self._num_added, action))
        self._num_added += 1

    def is_due(self, moment: float | None) -> bool:
        """Whether anything is to be done until then; None: at all."""
        return bool(self._heap) and (moment is None or self._heap[0][0] <= moment)

    def run_next(self) -> None:
        moment, _, action = heapq.heappop(self._heap)
        self.now = max(self.now, moment)
        action()
