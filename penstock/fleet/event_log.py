"""Log lines about what befalls replicas, each event one line, and never more than so many a minute.

Lines that were left out are counted in the next one. Knows nothing of what the events mean.
"""

import logging
from collections.abc import Callable
from typing import Any

from penstock.telemetry import log_event

_WINDOW_SECONDS = 60.0


class EventLog:
    def __init__(self, logger: logging.Logger, clock: Callable[[], float], *, max_per_minute: int = 20) -> None:
        self._logger = logger
        self._clock = clock
        self._max_per_minute = max_per_minute
        self._window_began = clock()
        self._num_written = 0  # in this window
        self._num_left_out = 0  # since the last line

    def write(self, message: str, *, level: int = logging.INFO, **values: Any) -> None:
        """Write one line with named values, unless there were too many within a minute."""
        now = self._clock()
        if now - self._window_began >= _WINDOW_SECONDS:
            self._window_began, self._num_written = now, 0
        if self._num_written >= self._max_per_minute:
            self._num_left_out += 1
            return
        if self._num_left_out:
            values["lines_left_out"] = self._num_left_out
        self._num_written += 1
        self._num_left_out = 0
        log_event(self._logger, message, level=level, **values)
