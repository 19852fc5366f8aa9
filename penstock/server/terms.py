"""On what terms a request is served: the request's own word over its key's, and that over the server's.

Knows nothing of HTTP or of how the engine keeps them.
"""

from dataclasses import dataclass

from penstock.errors import InvalidParameter, UnsupportedParameter
from penstock.protocol.generation import GenerationRequest
from penstock.request import MAX_PRIORITY, NO_TARGETS, Targets, Tier
from penstock.tenants import KeyTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What was agreed: the fields of the engine's `Submit` that say how soon and before whom."""

    weight: float = 1.0
    priority: int = 0
    targets: Targets = NO_TARGETS
    deadline_seconds: float | None = None
    best_effort: bool = False
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
    ttft = _first(own.ttft_seconds, key.targets.ttft_seconds, server.ttft_seconds)
    per_token = _first(own.time_per_token_seconds, key.targets.time_per_token_seconds, server.time_per_token_seconds)
    return Terms(
        weight=key.weight,
        priority=_priority(wanted.priority, key.priority),
        targets=Targets(ttft, per_token),
        deadline_seconds=None if wanted.deadline_ms is None else wanted.deadline_ms / 1000,
        best_effort=bool(wanted.best_effort),
    )


def _priority(wanted: int | None, granted: int | None) -> int:
    if wanted is None:
        return granted or 0
    most = MAX_PRIORITY if granted is None else granted
    if not -MAX_PRIORITY <= wanted <= most:
        raise InvalidParameter("priority", wanted, f"give an integer from -{MAX_PRIORITY} to {most}")
    return wanted


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
