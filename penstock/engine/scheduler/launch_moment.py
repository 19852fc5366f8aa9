"""When the next step should be planned and launched: just before the device is free.

Whoever arrives until then is in it. Launched at once it would leave them for the one after, so that they wait for a
whole step more. Knows shapes and clocks only.
"""

from collections.abc import Callable

from penstock.engine.metrics import QuantileWindow
from penstock.engine.scheduler.step_times import StepTimes

# The device stands still for a moment only where a step is among the few that end soonest, compared with what was
# foreseen, or where planning and launching is among the few that take longest.
_EARLY_PART = 0.01
_SLOW_PART = 0.98
_WINDOW = 200
# Fewer steps than this tell nothing of the rare ones.
_LEAST_STEPS = 50


class LaunchMoment:
    """Looks at how well steps are foreseen and how long the host takes to launch one."""

    def __init__(self, times: StepTimes, clock: Callable[[], float]) -> None:
        self._times = times
        self._clock = clock
        self._host_seconds = QuantileWindow(_WINDOW)
        self._began = 0.0

    def begin(self) -> None:
        """A step is about to be planned. By how much that is late counts as the host's time too."""
        now = self._clock()
        self._began = min(now, self.due() or now)

    def end(self) -> None:
        """The step has been launched."""
        self._host_seconds.add(self._clock() - self._began)

    def due(self) -> float:
        """Return until when the next step may wait; 0.0 for not at all."""
        early = self._times.ratios.quantile(_EARLY_PART)
        host = self._host_seconds.quantile(_SLOW_PART)
        busy = self._times.sole_launched()
        if busy is None or early is None or host is None or len(self._host_seconds) < _LEAST_STEPS:
            return 0.0
        began, seconds = busy
        return began + early * seconds - host
