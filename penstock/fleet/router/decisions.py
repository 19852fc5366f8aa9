"""Why requests went where they went: the last of them, and the header that tells each caller its own.

Knows nothing of how choices are made.
"""

from collections import deque

import msgspec

from penstock.fleet.rollout.plan import DEFAULT_VERSION
from penstock.fleet.router.dispatch import Placement

ROUTE_HEADER = "x-penstock-route"
_MAX_KEPT = 512
_MAX_REASON = 300  # characters


class Decision(msgspec.Struct, kw_only=True):
    """One request's way through the gateway."""

    request_id: str
    time: float  # Unix time
    tenant: str
    model: str
    policy: str
    replica: str  # that answered, or failed it last; empty: it was sent to none
    version: str = DEFAULT_VERSION  # of the replica
    reason: str  # of the choice or, of what the gateway refused, of that
    attempts: int  # places it was sent to before its first byte, this one included
    waited_seconds: float  # in the gateway
    predicted_ttft_seconds: float | None = None
    ttft_seconds: float | None = None  # from arrival to the replica's first byte
    predicted_cached_tokens: int | None = None
    cached_tokens: int | None = None  # of the caller's prompt, as the last replica that answered says
    prompt_tokens: int | None = None  # as it says too: without those of an answer that another began
    resumptions: int = 0  # replicas that failed in the middle and were replaced
    status: int = 500  # unless anything else is said: then something broke
    error_code: str = ""  # also of a stream that was lost, behind a status of 200

    def take(self, placement: Placement) -> None:
        """Note where it goes now."""
        self.policy, self.replica = placement.policy, placement.replica.name
        self.version = placement.replica.version
        self.reason = placement.choice.reason
        self.predicted_ttft_seconds = placement.choice.predicted_ttft_seconds
        self.predicted_cached_tokens = placement.choice.cached_tokens

    def refuse(self, reason: str, waited_seconds: float) -> None:
        """Note that the gateway itself refuses it."""
        self.reason, self.waited_seconds = reason, waited_seconds

    def header(self) -> str:
        parts = [f"replica={self.replica or 'none'}", f"policy={self.policy}", f'reason="{_plain(self.reason)}"']
        if self.version != DEFAULT_VERSION:
            parts.insert(1, f"version={self.version}")
        parts += [f"attempts={self.attempts}", f"waited_ms={self.waited_seconds * 1000:.1f}"]
        if self.predicted_ttft_seconds is not None:
            parts.append(f"predicted_ttft_ms={self.predicted_ttft_seconds * 1000:.1f}")
        if self.ttft_seconds is not None:
            parts.append(f"ttft_ms={self.ttft_seconds * 1000:.1f}")
        if self.predicted_cached_tokens is not None:
            parts.append(f"predicted_cached_tokens={self.predicted_cached_tokens}")
        if self.cached_tokens is not None:
            parts.append(f"cached_tokens={self.cached_tokens}")
        return "; ".join(parts)


def _plain(reason: str) -> str:
    """Return a reason as it may stand in a header: a refusal's may quote what a caller sent."""
    plain = reason
    if not (reason.isascii() and reason.isprintable()):
        plain = "".join(character if character.isascii() and character.isprintable() else "?" for character in reason)
    return plain.replace('"', "'").replace(";", ",")[:_MAX_REASON]  # what separates parts of the header


class DecisionLog:
    """The newest decisions, and no more than that."""

    def __init__(self) -> None:
        self._kept: deque[Decision] = deque(maxlen=_MAX_KEPT)

    def add(self, decision: Decision) -> None:
        self._kept.append(decision)

    def newest(self, count: int) -> list[Decision]:
        return list(self._kept)[-count:][::-1] if count > 0 else []
