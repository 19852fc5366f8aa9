"""Who may take places in the queue: neither one tenant's flood nor a batch leaves others without one.

Online and batch requests have places of their own. Looks at who waits and who runs; changes neither. Knows nothing of
time.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass

from penstock.engine.own_requests import is_own
from penstock.engine.scheduler.placement import Placement
from penstock.engine.scheduler.request_state import RequestState
from penstock.errors import InvalidParameter
from penstock.tenants import OPEN_TENANT

# A tenant may have so many times the places waiting that are left to others ...
_TIMES_LEFT = 3
# ... not counting this part of all: it is for tenants that have nothing waiting, one place for each.
_KEPT_PART = 1 / 16


@dataclass(frozen=True, slots=True)
class NoPlace:
    """Why a call is not let in, and how many requests must end before it is."""

    message: str
    num_endings: int


class QueuePlaces:
    """The queue's bounds, `max_waiting` for each tier."""

    def __init__(self, placement: Placement, *, max_running: int, max_waiting: int) -> None:
        self._placement = placement
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._num_kept = int(max_waiting * _KEPT_PART)
        self._has_names = False  # without keys all requests are one tenant's, and the queue is its own

    def find(self, request: RequestState, num_promised: int) -> NoPlace | None:
        """Return why there is no place for all answers of the request's call; None if there is.

        `num_promised` places are those of calls under way. Raises InvalidParameter where there never will be.
        """
        tenant, num_answers = request.tenant, request.call_answers
        self._has_names = self._has_names or not (is_own(tenant) or tenant in ("", OPEN_TENANT))
        self._check_possible(num_answers)
        tier = request.level[0]
        num_queued = self._num_queued(tier) + num_promised
        num_rows = self._num_rows_for(tier)
        num_waiting = max(0, num_queued - num_rows)
        wanted = num_answers - max(0, num_rows - num_queued)  # the others get a row at once
        if wanted <= 0:
            return None
        num_left = self._max_waiting - num_waiting
        if not self._has_names:
            return _whole(self._max_waiting, num_left, wanted)
        own = min(num_waiting, self._num_own(tenant, tier))
        if own == 0 and wanted == 1:
            return _whole(self._max_waiting, num_left, wanted)
        missing = own + wanted - _TIMES_LEFT * (num_left - wanted - self._num_kept)
        if missing <= 0:
            return None
        # A place that somebody leaves counts so many times, and once more where it was the tenant's own.
        num_endings = math.ceil(missing / (_TIMES_LEFT + (own == num_waiting)))
        part = max(0, _TIMES_LEFT * (num_left + own - self._num_kept) // (_TIMES_LEFT + 1))
        message = f"{own} of your requests are waiting, and your part of the queue has {part} places now"
        return NoPlace(message + _of_answers(wanted), max(num_endings, wanted - num_left))

    def _check_possible(self, num_answers: int) -> None:
        part = _TIMES_LEFT * (self._max_waiting - self._num_kept) // (_TIMES_LEFT + 1)
        most = self._max_running + (max(part, min(1, self._max_waiting)) if self._has_names else self._max_waiting)
        if num_answers > max(1, most):
            right = f"one tenant's call can have at most {most} answers here; ask for fewer"
            raise InvalidParameter("n", num_answers, right)

    def _num_queued(self, tier: int) -> int:
        """Requests that wait and are not about to go on with the blocks they hold."""
        return self._placement.waiting.num_of_tier(tier) - self._placement.parked.num_of_tier(tier)

    def _num_own(self, tenant: str, tier: int) -> int:
        waiting, parked = self._placement.waiting, self._placement.parked
        return waiting.num_of_tenant(tenant, tier) - parked.num_of_tenant(tenant, tier)

    def _num_rows_for(self, tier: int) -> int:
        """Rows that nobody has who may keep it: batch requests give theirs up to online ones."""
        num_free = len(self._placement.free_rows)
        if tier == 0:
            running = self._placement.running  # best first
            return num_free + len(running) - bisect_left(running, 1, key=_tier)
        return max(0, num_free - self._num_queued(0))


def _whole(max_waiting: int, num_left: int, wanted: int) -> NoPlace | None:
    if wanted <= num_left:
        return None
    message = f"{max_waiting - max(0, num_left)} requests are waiting, and the queue has {max_waiting} places"
    return NoPlace(message + _of_answers(wanted), wanted - num_left)


def _of_answers(wanted: int) -> str:
    return f", too few for {wanted} answers of this call" if wanted > 1 else ""


def _tier(request: RequestState) -> int:
    return request.level[0]
