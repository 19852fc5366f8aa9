"""Whether this server stood still until a moment ago: its engine's process, or this one with whatever else is stopped.

A gateway asks another server for what such a server owes. Here that looks as if a caller had left, and only the time
that is missing tells. Knows nothing of requests.
"""

import time
from collections.abc import Callable

from penstock.server.readiness import MAX_STILL_SECONDS, EngineView

LOOK_SECONDS = 0.5
_RECENT_SECONDS = 1.0  # what ended while nobody could look is seen within so long


class Standstill:
    def __init__(self, engine: EngineView, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._looked_at: float | None = None
        self._still_at: float | None = None

    def look(self) -> None:
        """Take in how things are. To be called every `LOOK_SECONDS`: a look that comes late tells of this process."""
        now = self._clock()
        is_late = self._looked_at is not None and now - self._looked_at > MAX_STILL_SECONDS
        if is_late or (self._engine.connected and self._engine.pulse_age_seconds > MAX_STILL_SECONDS):
            self._still_at = now
        self._looked_at = now

    def is_recent(self) -> bool:
        """Whether it stands still, or did a moment ago."""
        self.look()
        return self._still_at is not None and self._clock() - self._still_at <= _RECENT_SECONDS
