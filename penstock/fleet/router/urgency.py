"""How soon a request must be served and before whom: the caller's word, within what its key grants.

Values that make no sense count as not given; the replica refuses them. Knows nothing of queues or replicas.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.fleet.router.query import RequestHead, read_document
from penstock.request import MAX_PRIORITY
from penstock.tenants import KeyTerms

_LEAST_MS = 1.0  # a replica takes no less, and will say itself that it is too late


@dataclass(frozen=True, slots=True)
class Urgency:
    """Moments are on the monotonic clock."""

    priority: int = 0
    deadline: float | None = None  # when the whole answer is worth nothing any more
    first_token_by: float | None = None

    @property
    def latest(self) -> float | None:
        """When it makes no sense to wait any longer."""
        if self.deadline is None or self.first_token_by is None:
            return self.first_token_by if self.deadline is None else self.deadline
        return min(self.deadline, self.first_token_by)


PLAIN = Urgency()


def urgency_of(head: RequestHead, terms: KeyTerms, arrival: float) -> Urgency:
    """Return what a request that arrived at `arrival` wants."""
    wanted = head.targets
    told = _seconds(wanted.get("ttft_ms")) if wanted is not None and isinstance(wanted, Mapping) else None
    ttft = told or terms.targets.ttft_seconds
    if head.best_effort is True:
        ttft = None  # rather late than refused
    deadline = _seconds(head.deadline_ms) or terms.targets.deadline_seconds
    if ttft is None and deadline is None and head.priority is None and not terms.priority:
        return PLAIN
    return Urgency(
        priority=_priority(head.priority, terms.priority),
        deadline=None if deadline is None else arrival + deadline,
        first_token_by=None if ttft is None else arrival + ttft,
    )


def with_time_left(body: bytes, urgency: Urgency, now: float, *, has_begun: bool) -> bytes:
    """Return a request as a replica must see it now: what passed since it arrived here is gone.

    Whoever `has_begun` to answer has sent its first token: a replica that goes on with it asks for none in time, and
    keeps the time per token as far as it can.
    """
    if (urgency.deadline if has_begun else urgency.latest) is None:
        return body
    document = read_document(body)
    if urgency.deadline is not None:
        document["deadline_ms"] = _left_ms(urgency.deadline, now)
    if urgency.first_token_by is not None and not has_begun:
        document["targets"] = {**(document.get("targets") or {}), "ttft_ms": _left_ms(urgency.first_token_by, now)}
    return msgspec.json.encode(document)


def _left_ms(moment: float, now: float) -> float:
    return max(_LEAST_MS, round((moment - now) * 1000, 3))


def _priority(wanted: Any, granted: int | None) -> int:
    most = MAX_PRIORITY if granted is None else granted
    is_usable = isinstance(wanted, int) and not isinstance(wanted, bool) and -MAX_PRIORITY <= wanted <= most
    return int(wanted) if is_usable else granted or 0


def _seconds(milliseconds: Any) -> float | None:
    if milliseconds is None or isinstance(milliseconds, bool) or not isinstance(milliseconds, int | float):
        return None
    if not 0 < milliseconds < 1e12:
        return None
    return milliseconds / 1000
