"""How soon a process that ended is started again, and when trying again would not help.

Knows whether each run of it ever served, and nothing else: no processes, no time.
"""

_MAX_FAILED_STARTS = 5
_PAUSE_SECONDS = (0.0, 0.5, 1.0, 2.0, 5.0)  # by the number of starts that failed one after the other


class Restarts:
    """The runs of one process. Whatever has served is started again for ever, however soon it dies each time."""

    def __init__(self) -> None:
        self.num_failed = 0  # starts that led to nothing, since it last served

    def note_end(self, *, has_served: bool) -> None:
        """A run has ended."""
        self.num_failed = 0 if has_served else self.num_failed + 1

    @property
    def are_hopeless(self) -> bool:
        """Whether it died so often without ever serving that it will not get better by itself."""
        return self.num_failed >= _MAX_FAILED_STARTS

    @property
    def pause_seconds(self) -> float:
        """How long to wait before the next start."""
        return _PAUSE_SECONDS[min(self.num_failed, len(_PAUSE_SECONDS) - 1)]
