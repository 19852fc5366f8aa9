"""What the autoscalers are doing and why, as /admin/autoscaler tells it."""

from collections.abc import Sequence

import msgspec

from penstock.fleet.autoscaler.autoscaler import Autoscaler
from penstock.fleet.autoscaler.signals import FleetSignals


class ChangeReport(msgspec.Struct, frozen=True, kw_only=True):
    seconds_ago: float
    before: int
    after: int
    reason: str


class AutoscalerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One model's."""

    model: str
    policy: str
    backend: str
    desired: int  # replicas that should be there, the warm ones included: what KEDA reads
    active: int  # of these, those that should take requests
    proposed: int  # by the policy, before limits and cooldowns
    reason: str
    failure: str | None  # why the backend could not be asked, or what the last start failed by
    signals: FleetSignals | None
    changes: list[ChangeReport]  # newest first


class AutoscalerReports(msgspec.Struct, frozen=True):
    autoscalers: list[AutoscalerReport]


def report_all(autoscalers: Sequence[Autoscaler], now: float) -> AutoscalerReports:
    return AutoscalerReports([report(item, now) for item in autoscalers])


def report(autoscaler: Autoscaler, now: float) -> AutoscalerReport:
    section, decision = autoscaler.section, autoscaler.decision
    return AutoscalerReport(
        model=autoscaler.model,
        policy=section.policy,
        backend=str(section.backend["kind"]),
        desired=decision.total if decision is not None else section.min_replicas,
        active=decision.desired if decision is not None else section.min_replicas,
        proposed=decision.proposed if decision is not None else section.min_replicas,
        reason=decision.reason if decision is not None else "nothing was looked at yet",
        failure=autoscaler.failure,
        signals=autoscaler.signals,
        changes=[
            ChangeReport(seconds_ago=now - item.moment, before=item.before, after=item.after, reason=item.reason)
            for item in reversed(autoscaler.changes)
        ],
    )
