"""As many replicas as keep the promises that they make: a floor from demand, and corrections when one is in danger.

Demand is the device time that tokens cost, which replicas measure themselves; it grows in a line with the load where
queue lengths and times per token grow without bound. One replica's capacity is the part of its time that may go into
work while promises are kept; where it begins is stated, and promises kept and broken move it.
"""

import math
from collections import deque

from penstock.fleet.autoscaler.policies.interface import Proposal, ScalePolicy
from penstock.fleet.autoscaler.signals import FleetSignals
from penstock.fleet.config import AutoscalerSection

# The line through demand is drawn over so many times what a start takes, and over no less than this.
_TREND_STARTS = 3.0
_LEAST_TREND_SECONDS = 10.0
# So many standard errors of a slope are taken for noise.
_DOUBT = 3.0
# More KV than this in use, and requests will soon be preempted.
_KV_PRESSURE = 0.9
# A load that has just come looks like one that rises without end: a trend may add this part, corrections the rest.
_MOST_RISE = 0.25
_LEAST_CAPACITY, _MOST_CAPACITY = 0.3, 0.95
# A promise broken at less than the stated utilisation lowers it by a part; each look that keeps all of them near it
# raises it by less.
_LOWER, _RAISE = 0.02, 0.001
_NEAR = 0.95
# However much was missed: demand is at most so much more than what was done.
_MOST_UNMET = 0.5
# Less than this part of a replica is no reason for one.
_NOTHING = 0.01
# A prompt that waits for longer, though the devices have time, waits for a place among those that run.
_LONG_WAIT_SECONDS = 1.0


class Promises(ScalePolicy):
    def __init__(self, section: AutoscalerSection) -> None:
        self._capacity = section.target_utilization
        self._goal = section.attainment
        self._looks: deque[FleetSignals] = deque()
        self._places = math.inf  # requests that a replica runs at once, as far as a full one has shown

    def propose(self, signals: FleetSignals) -> Proposal:
        self._remember(signals)
        self._learn(signals)
        horizon = max(signals.start_seconds, 1.0)
        level, slope = self._line()
        forecast = max(0.0, level + min(slope * horizon, _MOST_RISE * level))
        count = math.ceil(forecast / self._capacity - _NOTHING)
        reason = f"forecast {forecast:.2f} replicas of work, each working {self._capacity:.0%} of its time"
        urgent, why = self._correction(signals, forecast, horizon)
        return Proposal(urgent, f"{why}; {reason}") if urgent > count else Proposal(count, reason)

    def _correction(self, signals: FleetSignals, forecast: float, horizon: float) -> tuple[int, str]:
        """What is needed now, whatever demand was before."""
        num_ready = signals.num_ready
        # A replica started now is there to clear, in as long as it took to start, what has queued up.
        backlog = math.ceil((forecast + signals.backlog_seconds / horizon) / self._capacity - _NOTHING)
        wanted = (backlog, f"a prompt would wait {signals.queue_seconds:.2f} s")
        if signals.num_held and num_ready == 0:
            wanted = max(wanted, (1, f"{signals.num_held} requests are held"))
        if num_ready and signals.kv_utilization > _KV_PRESSURE:
            crowded = math.ceil(num_ready * signals.kv_utilization / _KV_PRESSURE)
            wanted = max(wanted, (crowded, f"{signals.kv_utilization:.0%} of the KV cache is in use"))
        wanted = max(wanted, self._for_places(signals))
        missed = self._missed(horizon)
        if missed > 1.0 - self._goal and self._is_loaded(signals):
            # What was refused, or came too late, is work that nobody saw done.
            unmet = math.ceil(forecast / (1.0 - min(missed, _MOST_UNMET)) / self._capacity)
            wanted = max(wanted, (unmet, f"{missed:.1%} of the promises were missed"))
        return wanted

    def _for_places(self, signals: FleetSignals) -> tuple[int, str]:
        """What is needed so that nobody waits for a place, which demand does not tell.

        One more at a time: what is coming may be enough, and stays until it is there. Those that are there stay for as
        long as fewer would have too few places.
        """
        num_ready = signals.num_ready
        if not num_ready:
            return 0, ""
        waits = signals.queue_seconds > _LONG_WAIT_SECONDS and not self._is_loaded(signals)
        if signals.num_held or waits:
            self._places = max(1.0, signals.num_running / num_ready)
            why = f"every replica is full, {signals.num_held} requests are held"
            if not signals.num_held:
                why = f"a prompt would wait {signals.queue_seconds:.2f} s for a place"
            return num_ready + max(signals.num_coming, 1), why
        self._places = max(self._places, signals.num_running / num_ready)
        needed = min(num_ready, math.ceil(signals.num_requests / self._places - _NOTHING))
        return needed, f"a replica runs {self._places:.0f} requests at once"

    def _remember(self, signals: FleetSignals) -> None:
        self._looks.append(signals)
        window = max(_LEAST_TREND_SECONDS, _TREND_STARTS * signals.start_seconds)
        while self._looks[0].moment < signals.moment - window:
            self._looks.popleft()

    def _line(self) -> tuple[float, float]:
        """Demand now and how fast it rises: by least squares, and only as far as the noise lets one believe it."""
        start = self._looks[-1].moment
        points = [(look.moment - start, look.demand) for look in self._looks]
        count = len(points)
        mean_time = sum(time for time, _ in points) / count
        mean = sum(demand for _, demand in points) / count
        spread = sum((time - mean_time) ** 2 for time, _ in points)
        if count < 3 or spread <= 0.0:
            return max(points[-1][1], mean), 0.0
        slope = sum((time - mean_time) * (demand - mean) for time, demand in points) / spread
        rest = sum((demand - mean - slope * (time - mean_time)) ** 2 for time, demand in points)
        error = math.sqrt(rest / (count - 2) / spread)
        slope = math.copysign(max(0.0, abs(slope) - _DOUBT * error), slope)
        return mean - slope * mean_time, max(0.0, slope)

    def _recent(self, seconds: float) -> list[FleetSignals]:
        return [look for look in self._looks if look.moment > self._looks[-1].moment - seconds]

    def _missed(self, seconds: float) -> float:
        """Of the promises of the last so many seconds, the part that was missed."""
        recent = self._recent(seconds)
        missed = sum(look.num_missed for look in recent)
        return missed / max(1.0, missed + sum(look.num_kept for look in recent))

    def _is_loaded(self, signals: FleetSignals) -> bool:
        """Whether more replicas could help: what is missed on an idle fleet is missed for another reason."""
        return signals.demand > _LEAST_CAPACITY * signals.num_ready

    def _learn(self, signals: FleetSignals) -> None:
        recent = self._recent(signals.start_seconds)
        if not signals.num_ready or any((look.num_ready, look.num_coming) != (signals.num_ready, 0) for look in recent):
            return  # while the fleet changes, what is missed tells nothing of how many it needs
        utilization = signals.demand / signals.num_ready
        total = signals.num_kept + signals.num_missed
        if signals.num_missed > (1.0 - self._goal) * total and _LEAST_CAPACITY < utilization <= self._capacity:
            self._capacity = max(_LEAST_CAPACITY, self._capacity - _LOWER)
        elif signals.num_kept and not signals.num_missed and utilization >= _NEAR * self._capacity:
            self._capacity = min(_MOST_CAPACITY, self._capacity + _RAISE)
