"""Whether an engine that has served stands still for so long that only another one helps.

`readiness` says within seconds that it does, and it may go on; this is for one that never will. Knows nothing of
processes: whoever looks ends it.
"""

import math
from dataclasses import dataclass

from penstock.engine.messages import STATS_SECONDS
from penstock.server.readiness import EngineView

LOOK_SECONDS = 1.0
# An engine whose loop turns has spoken, and beaten its pulse, since the look before.
_FRESH_SECONDS = LOOK_SECONDS + STATS_SECONDS


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an engine may stand still before it is given up."""

    still_seconds: float = 60.0  # the whole process: stopped or frozen
    step_seconds: float = 300.0  # one step, or whatever else its loop is at: seconds are usual, captures take more


class EngineWatch:
    """Counts looks, not time: what stops whoever looks as well, a laptop that sleeps for example, does not count."""

    def __init__(self, engine: EngineView, patience: Patience) -> None:
        self._engine = engine
        self._most_still = math.ceil(patience.still_seconds / LOOK_SECONDS)
        self._most_stuck = math.ceil(patience.step_seconds / LOOK_SECONDS)
        self._num_still = 0  # looks in a row that found no pulse
        self._num_stuck = 0  # looks in a row that found no progress
        self._steps_seen = 0

    def look(self) -> str | None:
        """Return why the engine should be ended; None: it should not. To be called every `LOOK_SECONDS`."""
        engine = self._engine
        if not engine.connected:  # it starts, which takes as long as it takes
            self._num_still = self._num_stuck = 0
            return None
        self._num_still = self._num_still + 1 if engine.pulse_age_seconds > _FRESH_SECONDS else 0
        self._num_stuck = 0 if self._gets_on() else self._num_stuck + 1
        if self._num_still >= self._most_still:
            return f"its process has stood still for {self._num_still * LOOK_SECONDS:.0f} s"
        if self._num_stuck >= self._most_stuck:
            return f"it has finished no step and said nothing for {self._num_stuck * LOOK_SECONDS:.0f} s"
        return None

    def _gets_on(self) -> bool:
        stats = self._engine.stats
        before, self._steps_seen = self._steps_seen, stats.num_steps
        is_idle = not stats.num_running and self._engine.stats_age_seconds <= _FRESH_SECONDS
        return is_idle or stats.num_steps != before
