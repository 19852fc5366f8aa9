"""How long a replica takes from its start until it is ready, learnt from those that were started.

Time is the caller's.
"""

from collections import deque

_LEARNING_RATE = 0.3


class StartTimes:
    """Follows the number asked for and the number there."""

    def __init__(self, first_guess_seconds: float) -> None:
        self.seconds = first_guess_seconds
        self._target: int | None = None
        self._rises: deque[tuple[int, float]] = deque()  # (number to be reached, when it was asked for)

    def observe(self, moment: float, target: int, num_there: int) -> None:
        """`num_there` replicas are ready while so many are wanted."""
        while self._rises and self._rises[-1][0] > target:  # not wanted any more: nothing is learnt from it
            self._rises.pop()
        if self._target is not None:
            self._rises += [(number, moment) for number in range(max(self._target, num_there) + 1, target + 1)]
        self._target = target
        while self._rises and self._rises[0][0] <= num_there:
            taken = moment - self._rises.popleft()[1]
            self.seconds += _LEARNING_RATE * (taken - self.seconds)
