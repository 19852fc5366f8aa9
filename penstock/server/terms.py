"""On what terms a request is served: the request's own word over its key's, and that over the server's.

Knows nothing of HTTP or of how the engine keeps them.
"""

from dataclasses import dataclass

from penstock.errors import InvalidParameter, UnsupportedParameter
from penstock.protocol.generation import GenerationRequest
from penstock.request import MAX_PRIORITY, NO_TARGETS, OWN_TARGETS, TargetOrigin, TargetOrigins, Targets, Tier
from penstock.tenants import KeyTerms

_ROUNDING = 1.0 - 1e-9  # a key's seconds and a request's milliseconds may differ in the last bit


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What was agreed: the fields of the engine's `Submit` that say how soon and before whom."""

    weight: float = 1.0
    priority: int = 0
    targets: Targets = NO_TARGETS
    target_origins: TargetOrigins = OWN_TARGETS
    deadline_seconds: float | None = None
    best_effort: bool = False
    has_moved: bool = False
    tier: Tier = Tier.ONLINE


def agree_on_batch(wanted: GenerationRequest, key: KeyTerms) -> Terms:
    """Return the terms of a line of a batch: in idle capacity, within the batch's own window. Raises RequestError."""
    for name in ("targets", "deadline_ms", "continue_from"):
        if getattr(wanted, name) is not None:
            value = wanted.model_dump(include={name})[name]
            right = "leave it out: a line of a batch is a whole request that nobody waits for"
            raise UnsupportedParameter(name, value, right)
    return Terms(weight=key.weight, priority=_priority(wanted.priority, key.priority), tier=Tier.BATCH)


def agree(wanted: GenerationRequest, key: KeyTerms, server: Targets) -> Terms:
    """Return the terms of a request. Raises InvalidParameter."""
    own = wanted.wanted_targets()
    ttft, ttft_origin = _stated(own.ttft_seconds, key.targets.ttft_seconds, server.ttft_seconds)
    if wanted.continue_from is not None:
        ttft = None  # the caller has had its first token
    granted, origin = _stated(None, key.targets.time_per_token_seconds, server.time_per_token_seconds)
    per_token = granted
    if own.time_per_token_seconds is not None:
        per_token, origin = _allowed_pace(own.time_per_token_seconds, granted, wanted, key), TargetOrigin.REQUEST
    asked = None if wanted.deadline_ms is None else wanted.deadline_ms / 1000
    deadline, deadline_origin = _stated(asked, key.targets.deadline_seconds, server.deadline_seconds)
    return Terms(
        weight=key.weight,
        priority=_priority(wanted.priority, key.priority),
        targets=Targets(ttft, per_token),
        target_origins=TargetOrigins(ttft_origin, origin, deadline_origin),
        deadline_seconds=deadline,
        best_effort=bool(wanted.best_effort),
        has_moved=wanted.continue_from is not None,
    )


def _priority(wanted: int | None, granted: int | None) -> int:
    if wanted is None:
        return granted or 0
    most = MAX_PRIORITY if granted is None else granted
    if not -MAX_PRIORITY <= wanted <= most:
        raise InvalidParameter("priority", wanted, f"give an integer from -{MAX_PRIORITY} to {most}")
    return wanted


def _allowed_pace(asked: float, granted: float | None, wanted: GenerationRequest, key: KeyTerms) -> float | None:
    """Return the time per token that a request is served with that asks for one itself. Raises InvalidParameter.

    A promised one makes steps shorter for everybody, and keeps its row and others out: with keys nobody takes that for
    himself.
    """
    if key.are_open or wanted.best_effort or (granted is not None and asked >= granted * _ROUNDING):
        return asked
    if wanted.continue_from is not None:
        return None  # promised by another server; here nobody may, and its stream need not end for that
    right = (
        "this key was granted none; leave it out or give best_effort, or have targets.time_per_token_seconds set for it"
    )
    if granted is not None:
        right = f"the least that this key may ask for is {granted * 1000:g}; give no less, or best_effort"
    raise InvalidParameter("targets.time_per_token_ms", asked * 1000, right)


def _stated(*values: float | None) -> tuple[float | None, TargetOrigin]:
    """Return the first value of the request's, its key's and the server's that there is, and whose it is."""
    for value, origin in zip(values, TargetOrigin, strict=True):
        if value is not None:
            return value, origin
    return None, TargetOrigin.REQUEST
