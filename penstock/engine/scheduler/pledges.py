"""First tokens that were promised and have not come: while all will be in time, tenants take turns as ever.

Once the next steps cannot be left to others, the promised prompts go before them, the one that is due first ahead: a
later comer may pass only as long as there is time for it. Changes nothing but its own list. Knows nothing of turns.
"""

from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.engine.scheduler.cost_model import StepShape
from penstock.engine.scheduler.request_state import RequestState
from penstock.engine.scheduler.serving_pace import MOST_PAUSED_STEPS, ServingPace
from penstock.engine.scheduler.step_times import StepTimes

# Steps that could be left to others with every promise kept, or the part of the time that was promised: with less to
# spare, the promised ones go first, and answers pause for them.
_SPARE_STEPS = 3.0
_SPARE_PART = 0.1

_Entry = tuple[float, int, RequestState]  # when its first token must come, its number


@dataclass(frozen=True, slots=True)
class Pressed:
    """Whose prompts go first, whoever's turn it is."""

    places: Mapping[int, int]  # by request number: smaller goes first
    may_pause: bool = False  # whether answers do for them

    def place(self, request: RequestState) -> int:
        return self.places.get(request.number, len(self.places))


NOBODY = Pressed({})


class Pledges:
    """The first tokens that were promised, in the order in which they are due."""

    def __init__(self, times: StepTimes, pace: ServingPace) -> None:
        self._times = times
        self._pace = pace
        self._entries: list[_Entry] = []

    def note_taken(self, request: RequestState) -> None:
        """A request was let in, perhaps with a promise."""
        limit = _limit(request)
        if limit is not None:
            insort(self._entries, (limit, request.number, request))

    def note_end(self, request: RequestState) -> None:
        """A request that was let in has ended."""
        self._entries = [entry for entry in self._entries if entry[2] is not request]

    def pressed(self, shape: StepShape, now: float) -> Pressed:
        """Return who goes first in the next step, beside rows of this shape. Alone, a tenant needs no such order."""
        self._entries = [entry for entry in self._entries if entry[2].first_token_at is None]
        if not self._entries or not self._pace.is_shared or not self._times.model.is_trusted:
            return NOBODY
        is_pressed = self._each_is_pressed(shape, now)
        num_pressed = max([index for index, pressed in enumerate(is_pressed, start=1) if pressed], default=0)
        if not num_pressed:
            return NOBODY
        places = {number: place for place, (_, number, _) in enumerate(self._entries[:num_pressed])}
        return Pressed(places, may_pause=self._times.num_without_answers < MOST_PAUSED_STEPS)

    def _each_is_pressed(self, shape: StepShape, now: float) -> Iterator[bool]:
        """Yield whether each has little time to spare if all go in the order in which they are due."""
        chunk, step_seconds = self._pace.steady_step(shape, None)
        token_seconds = step_seconds / max(1, chunk)
        begin, num_tokens = self._times.free_at(now), 0
        for limit, _, request in self._entries:
            if not request.in_flight:  # else it is under way
                num_tokens += request.remaining
            spare = limit - begin - num_tokens * token_seconds
            yield spare < min(_SPARE_STEPS * step_seconds, _SPARE_PART * (limit - request.arrival))


def _limit(request: RequestState) -> float | None:
    """When a request's first token must have come, so that what was promised to it is kept; None if nothing was."""
    if request.best_effort or request.has_moved or request.is_batch:
        return None
    limits = []
    if request.targets.ttft_seconds is not None:
        limits.append(request.arrival + request.targets.ttft_seconds)
    if request.deadline is not None:
        limits.append(request.deadline - request.predicted_answer)
    return min(limits, default=None)
