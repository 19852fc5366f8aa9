"""Whether this server should be sent work: connected, heard from lately, and moving when it has something to do.

Knows nothing of HTTP.
"""

import time
from typing import Protocol

from penstock.engine.messages import STATS_SECONDS, EngineInfo, EngineStats
from penstock.errors import EngineStalled, NotReady
from penstock.server.open_answers import OpenAnswers

# The engine speaks between steps, and a step may be long: a large prefill on a slow CPU takes seconds.
# Its pulse goes on meanwhile, unless the whole process stands still.
MAX_STILL_SECONDS = 2.0
MAX_IDLE_SILENCE_SECONDS = 10 * STATS_SECONDS
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
    def pulse_age_seconds(self) -> float: ...
    @property
    def connected(self) -> bool: ...


class Readiness:
    def __init__(self, engine: EngineView, answers: OpenAnswers) -> None:
        self._engine = engine
        self._answers = answers
        self._busy_since: float | None = None  # when it was first seen with work at this count of steps
        self._steps_seen = 0

    def check(self) -> None:
        """Raise NotReady, with the reason, unless work sent now would be done."""
        if self._answers.draining:
            raise NotReady("the server is draining: it finishes open requests and takes no new ones")
        if self._engine.info is None:
            raise NotReady("the engine is starting")
        if not self._engine.connected:
            raise NotReady("the engine is restarting")
        still = self._engine.pulse_age_seconds
        if still > MAX_STILL_SECONDS:
            raise EngineStalled(f"the engine process has stood still for {still:.1f} s")
        stats, age = self._engine.stats, self._engine.stats_age_seconds
        busy = bool(stats.num_running or stats.num_waiting or len(self._answers))
        if age > (MAX_STEP_SECONDS if busy else MAX_IDLE_SILENCE_SECONDS):
            raise EngineStalled(f"the engine has not been heard from for {age:.1f} s")
        if stats.fault is not None:
            raise NotReady(stats.fault)
        idle = self._seconds_without_step()
        if idle > MAX_STEP_SECONDS:
            raise EngineStalled(f"the engine has work but has finished no step for {idle:.1f} s")

    def _seconds_without_step(self) -> float:
        """Return how long the engine has been seen with work and without a finished step; 0 when it has none."""
        stats, now = self._engine.stats, time.monotonic()
        if not stats.num_running:
            self._busy_since = None
            return 0.0
        if self._busy_since is None or stats.num_steps != self._steps_seen:
            self._busy_since, self._steps_seen = now, stats.num_steps
        return now - self._busy_since
