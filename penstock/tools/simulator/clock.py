"""A clock that stands still until somebody sleeps."""


class VirtualClock:
    """One replica's time, in seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds

    def advance_to(self, moment: float) -> None:
        """Go forward to a moment; one that has passed changes nothing."""
        self._now = max(self._now, moment)
