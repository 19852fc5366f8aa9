"""How many answers of batches one API worker has under way: enough to fill idle capacity, hardly any that wait.

Grows while the engine has nobody waiting and shrinks by those who do. Knows nothing of batches or their lines.
"""

from penstock.engine.messages import STATS_SECONDS

FEWEST, MOST = 16, 512


class Window:
    def __init__(self) -> None:
        self.size = FEWEST
        self._looked_at: float | None = None

    def look(self, now: float, num_waiting: int, *, is_full: bool) -> None:
        """Take in what the engine last told, and whether there was more to run than fits."""
        if self._looked_at is not None and now - self._looked_at < STATS_SECONDS:
            return
        self._looked_at = now
        if num_waiting > self.size // 4:
            self.size = max(FEWEST, self.size - num_waiting)
        elif num_waiting == 0 and is_full:
            self.size = min(MOST, self.size * 2)

    def shrink(self) -> None:
        """The engine had no place."""
        self.size = max(FEWEST, self.size // 2)
