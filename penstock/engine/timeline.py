"""Where start-up time goes: phases that follow one another, so that their parts sum to the total."""

import os
import time
from pathlib import Path


class Timeline:
    """Marks the end of each phase on the monotonic clock, which all local processes share."""

    def __init__(self, started: float) -> None:
        self.started = started
        self.phases: list[tuple[str, float]] = []
        self._last = started

    def mark(self, phase: str) -> None:
        """End a phase now."""
        now = time.monotonic()
        self.phases.append((phase, now - self._last))
        self._last = now

    def extend(self, phases: list[tuple[str, float]]) -> None:
        """Take over phases that another process went through since the last mark."""
        self.phases.extend(phases)
        self._last += sum(seconds for _, seconds in phases)

    @property
    def total(self) -> float:
        return self._last - self.started


def process_started() -> float:
    """When this process began, on the monotonic clock; now, where the system does not tell."""
    try:
        # The 22nd field counts clock ticks since boot; the second may hold spaces, so count from its closing bracket.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return time.monotonic()
    return time.monotonic() - max(0.0, age)
