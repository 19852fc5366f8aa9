"""Keeps an outlook for each tier, and looks again only as often as the steps that run allow.

Following the load to its end takes the host longer, the more there is; whoever is refused costs nobody else a step, so
however many are, only so many requests are followed for each step. Knows nothing of refusals.
"""

from penstock.engine.scheduler.load import Load
from penstock.engine.scheduler.outlook import Outlook
from penstock.engine.scheduler.request_state import RequestState
from penstock.engine.scheduler.serving_pace import ServingPace
from penstock.engine.scheduler.step_times import StepTimes

# Requests that may be followed for each step that is launched: a millisecond or two of the host's.
FOLLOWED_A_STEP = 256


class Lookout:
    """Who looks ahead, for all that come."""

    def __init__(self, times: StepTimes, pace: ServingPace) -> None:
        self._times = times
        self._pace = pace
        self._kept: dict[int, Outlook] = {}  # by tier
        self._allowance = FOLLOWED_A_STEP
        self._num_launched = 0

    def look(self, tier: int, load: Load, now: float) -> Outlook:
        """Return what requests of a tier can expect: as it is now, or as it was some steps ago.

        An old outlook is no earlier than a new one: what was taken in since is added to it.
        """
        num_steps = self._times.num_launched - self._num_launched
        self._num_launched += num_steps
        self._allowance = min(FOLLOWED_A_STEP, self._allowance + num_steps * FOLLOWED_A_STEP)
        kept = self._kept.get(tier)
        is_over = kept is None or kept.num_past(now) >= len(kept.moments)
        if kept is not None and not is_over and (kept.is_true(load) or self._allowance <= 0):
            return kept
        kept = self._kept[tier] = Outlook(tier, load, self._times, self._pace, now)
        self._allowance -= kept.num_followed
        return kept

    def add(self, request: RequestState, answer_tokens: float) -> None:
        """A request was taken in."""
        for kept in self._kept.values():
            kept.add(request, answer_tokens)
