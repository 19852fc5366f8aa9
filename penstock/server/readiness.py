"""Whether this server should be sent work: connected, heard from lately, and moving when it has something to do.

Knows nothing of HTTP.
"""

import time
from typing import Protocol

from penstock.engine.messages import STATS_SECONDS, EngineInfo, EngineStats
from penstock.errors import NotReady
from penstock.server.open_answers import OpenAnswers

MAX_STATS_AGE_SECONDS = 10 * STATS_SECONDS
# A step may be long: a large prefill on a slow CPU takes seconds. Longer than this is a hang.
MAX_STEP_SECONDS = 30.0


class EngineView(Protocol):
    """The part of an engine client that tells how the engine is."""

    @property
    def info(self) -> EngineInfo | None: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def stats_age_seconds(self) -> float: ...
    @property
    def connected(self) -> bool: ...


class Readiness:
    def __init__(self, engine: EngineView, answers: OpenAnswers) -> None:
        self._engine = engine
        self._answers = answers
        self._steps_seen: int | None = None
        self._seen_at = 0.0  # when the count of steps was last seen to change, or the engine to be idle

    def check(self) -> None:
        """Raise NotReady, with the reason, unless work sent now would be done."""
        if self._answers.draining:
            raise NotReady("the server is draining: it finishes open requests and takes no new ones")
        if self._engine.info is None:
            raise NotReady("the engine is starting")
        if not self._engine.connected:
            raise NotReady("the engine is restarting")
        age = self._engine.stats_age_seconds
        if age > MAX_STATS_AGE_SECONDS:
            raise NotReady(f"the engine has not been heard from for {age:.1f} s")
        idle = self._seconds_without_step()
        if idle > MAX_STEP_SECONDS:
            raise NotReady(f"the engine has work but has finished no step for {idle:.1f} s")

    def _seconds_without_step(self) -> float:
        """Return how long the engine has been seen with work and without a finished step; 0 when it has none."""
        stats, now = self._engine.stats, time.monotonic()
        if not stats.num_running or stats.num_steps != self._steps_seen:
            self._steps_seen = stats.num_steps
            self._seen_at = now
        return now - self._seen_at
