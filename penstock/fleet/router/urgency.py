"""How soon a request must be served and before whom: the caller's word, within what its key grants.

Values that make no sense are nobody's wish here, and go to the replica as they are: it refuses them. Knows nothing of
queues or replicas.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.fleet.router.query import RequestHead, read_document
from penstock.request import MAX_PRIORITY
from penstock.tenants import KeyTerms

_LEAST_MS = 1.0  # a replica takes no less, and will say itself that it is too late
_MOST_MS = 604_800_000.0  # nor more; a key may state more


@dataclass(frozen=True, slots=True)
class Urgency:
    """Moments are on the monotonic clock."""

    priority: int = 0
    deadline: float | None = None  # when the whole answer is worth nothing any more
    first_token_by: float | None = None
    is_keys_deadline: bool = False  # the request itself states none
    is_keys_ttft: bool = False

    @property
    def latest(self) -> float | None:
        """When it makes no sense to wait any longer."""
        if self.deadline is None or self.first_token_by is None:
            return self.first_token_by if self.deadline is None else self.deadline
        return min(self.deadline, self.first_token_by)


PLAIN = Urgency()


def urgency_of(head: RequestHead, terms: KeyTerms, arrival: float) -> Urgency:
    """Return what a request that arrived at `arrival` wants."""
    ttft, is_keys_ttft = _stated(_ttft_of(head.targets), terms.targets.ttft_seconds)
    if head.best_effort is True:
        ttft = None  # rather late than refused
    deadline, is_keys_deadline = _stated(head.deadline_ms, terms.targets.deadline_seconds)
    if ttft is None and deadline is None and head.priority is None and not terms.priority:
        return PLAIN
    return Urgency(
        priority=_priority(head.priority, terms.priority),
        deadline=None if deadline is None else arrival + deadline,
        first_token_by=None if ttft is None else arrival + ttft,
        is_keys_deadline=is_keys_deadline,
        is_keys_ttft=is_keys_ttft,
    )


def with_time_left(body: bytes, urgency: Urgency, now: float, *, has_begun: bool, leaves_keys: bool = False) -> bytes:
    """Return a request as a replica must see it now: what passed since it arrived here is gone.

    With `leaves_keys` the replica knows itself what the caller's key states, and hardly any time has passed. Whoever
    `has_begun` to answer has sent its first token: a replica that goes on with it asks for none in time, and keeps the
    time per token as far as it can.
    """
    deadline = None if urgency.is_keys_deadline and leaves_keys else urgency.deadline
    first_token_by = None if has_begun or (urgency.is_keys_ttft and leaves_keys) else urgency.first_token_by
    if deadline is None and first_token_by is None:
        return body
    document = read_document(body)
    if deadline is not None:
        document["deadline_ms"] = _left_ms(deadline, now)
    if first_token_by is not None:
        document["targets"] = {**(document.get("targets") or {}), "ttft_ms": _left_ms(first_token_by, now)}
    return msgspec.json.encode(document)


def _left_ms(moment: float, now: float) -> float:
    return min(max(_LEAST_MS, round((moment - now) * 1000, 3)), _MOST_MS)


def _ttft_of(targets: Any) -> Any:
    """Return what a request's targets say of a first token; None where they say nothing of it."""
    return targets.get("ttft_ms") if isinstance(targets, Mapping) else targets


def _stated(asked: Any, granted: float | None) -> tuple[float | None, bool]:
    """Return the seconds that a request asks for or, where it says nothing, its key's; and whether it is those."""
    return (granted, granted is not None) if asked is None else (_seconds(asked), False)


def _priority(wanted: Any, granted: int | None) -> int:
    most = MAX_PRIORITY if granted is None else granted
    is_usable = isinstance(wanted, int) and not isinstance(wanted, bool) and -MAX_PRIORITY <= wanted <= most
    return int(wanted) if is_usable else granted or 0


def _seconds(milliseconds: Any) -> float | None:
    if milliseconds is None or isinstance(milliseconds, bool) or not isinstance(milliseconds, int | float):
        return None
    if not 0 < milliseconds <= _MOST_MS:
        return None
    return milliseconds / 1000
