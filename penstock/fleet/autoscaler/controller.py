"""How many replicas there should be, look by look: the policy's number within limits, cooldowns and the warm pool.

Pure logic over signals. Knows nothing of replicas' addresses, of HTTP or of what runs them; time is the signals'.
"""

from collections import deque

import msgspec

from penstock.fleet.autoscaler.policies.interface import ScalePolicy
from penstock.fleet.autoscaler.signals import FleetSignals
from penstock.fleet.config import AutoscalerSection


class ScaleDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What one look led to."""

    desired: int  # replicas that take requests
    warm: int  # and so many more, ready and without requests
    proposed: int  # by the policy, before limits and cooldowns
    reason: str

    @property
    def total(self) -> int:
        return self.desired + self.warm


class Controller:
    """Decides for one model."""

    def __init__(self, section: AutoscalerSection, policy: ScalePolicy) -> None:
        self._section = section
        self._policy = policy
        self._proposals: deque[tuple[float, int]] = deque()  # (when, how many) within the cooldown, falling
        self._busy_at: float | None = None

    def decide(self, signals: FleetSignals) -> ScaleDecision:
        """Return how many replicas there should be now."""
        section, now = self._section, signals.moment
        if self._busy_at is None or not signals.is_idle:
            self._busy_at = now
        if not self._proposals:  # what is found at the start was right until then
            self._cooled(now, signals.num_ready + signals.num_coming + signals.num_warm - section.warm_replicas)
        proposal = self._policy.propose(signals)
        reasons = [proposal.reason]
        count = self._cooled(now, proposal.count)
        if count > proposal.count:
            reasons.append(f"{proposal.count} must do for {section.scale_down_seconds:g} s before fewer stay")
        # The last replica goes by idleness alone: demand may be too small to see, or what is forecast from before.
        if count == 1 > section.min_replicas and self._is_long_idle(signals):
            count = 0
            reasons.append(f"nothing was asked for {section.idle_seconds:g} s")
        least = max(section.min_replicas, 0 if self._may_sleep(signals) else 1)
        if count < least:
            reasons.append(f"at least {least}" if least == section.min_replicas else "the last one stays until idle")
        elif count > section.max_replicas:
            reasons.append(f"at most {section.max_replicas}")
        desired = min(max(count, least), section.max_replicas)
        warm = min(section.warm_replicas, section.max_replicas - desired)
        return ScaleDecision(desired=desired, warm=warm, proposed=proposal.count, reason="; ".join(reasons))

    def _may_sleep(self, signals: FleetSignals) -> bool:
        """Whether there need be none: nothing to do for long enough, or nothing has come since there was none."""
        is_empty = signals.num_ready == signals.num_coming == signals.num_warm == 0
        return self._is_long_idle(signals) or (signals.is_idle and is_empty)

    def _is_long_idle(self, signals: FleetSignals) -> bool:
        assert self._busy_at is not None
        return signals.is_idle and signals.moment - self._busy_at >= self._section.idle_seconds

    def _cooled(self, now: float, count: int) -> int:
        """The most that was proposed within the cooldown: up at once, down when less has been enough for so long."""
        proposals = self._proposals
        while proposals and proposals[-1][1] <= count:
            proposals.pop()
        proposals.append((now, count))
        while proposals[0][0] < now - self._section.scale_down_seconds:
            proposals.popleft()
        return proposals[0][1]
