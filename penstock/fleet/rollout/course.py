"""The course of one rollout: which step it is in, what was found in each, and where it goes next.

Plain values and functions from one to the next; time is given. Knows nothing of traffic or of where it is kept.
"""

import enum

import msgspec

from penstock.errors import RequestError
from penstock.fleet.rollout.evidence import Evidence
from penstock.fleet.rollout.gate import Finding, Verdict, judge_pairs, judge_split, sum_up
from penstock.fleet.rollout.plan import SHADOW, WHOLE, GateSection, RolloutSection


class Status(enum.StrEnum):
    RUNNING = "running"
    PROMOTED = "promoted"  # every request goes to the candidate, which is the stable version from now on
    ROLLED_BACK = "rolled_back"
    ABORTED = "aborted"


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """One step that has ended."""

    step: str | float
    began_at: float  # Unix time
    ended_at: float
    looks: int
    outcome: str
    findings: list[Finding]  # of the last look


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One model's rollout, under way or over."""

    model: str
    stable: str
    candidate: str
    steps: tuple[str | float, ...]
    shadow_percent: float
    max_shadows: int
    gate: GateSection
    began_at: float  # Unix time
    step_began_at: float
    epoch: int  # rises with every step of every rollout of the model: what was seen belongs to one
    declared: str = ""  # the version that the fleet's file called stable when it began
    status: Status = Status.RUNNING
    place: int = 0  # of the step it is in
    looks: int = 0  # at this step
    next_look: int  # so many requests to each version, and it is looked at again
    has_passed: bool = False  # this step, but it is too early to leave it
    findings: list[Finding] = []  # of the last look at this step
    history: list[StepReport] = []
    reason: str = ""  # why it ended

    @property
    def is_running(self) -> bool:
        return self.status is Status.RUNNING

    @property
    def step(self) -> str | float:
        return self.steps[self.place]

    @property
    def is_shadowing(self) -> bool:
        return self.is_running and self.step == SHADOW

    @property
    def stable_now(self) -> str:
        """The version that requests get unless something says otherwise."""
        return self.candidate if self.status is Status.PROMOTED else self.stable

    @property
    def candidate_percent(self) -> float:
        """The part of the sessions that the candidate answers."""
        if not self.is_running:
            return WHOLE if self.status is Status.PROMOTED else 0.0
        return 0.0 if isinstance(self.step, str) else self.step


def stable_of(section: RolloutSection, rollout: Rollout | None) -> str:
    """Return the version that requests get: what the last rollout left, unless the file has named another since."""
    if rollout is None:
        return section.stable
    is_old_news = section.stable in (rollout.declared, rollout.stable, rollout.candidate)
    return rollout.stable_now if rollout.is_running or is_old_news else section.stable


def start(
    model: str,
    candidate: str,
    section: RolloutSection,
    before: Rollout | None,
    now: float,
    *,
    declared: str | None = None,
) -> Rollout:
    """Return a rollout at its beginning. Raises RequestError.

    `declared` is what the fleet's file calls stable, where `section` is not from there.
    """
    if before is not None and before.is_running:
        raise RequestError(f"a rollout of {before.candidate!r} is running for this model; abort it first")
    stable = stable_of(section, before)
    if candidate == stable:
        raise RequestError(f"{candidate!r} is the stable version of this model already", param="candidate")
    begun = Rollout(
        model=model, stable=stable, candidate=candidate, steps=section.steps, shadow_percent=section.shadow_percent,
        max_shadows=section.max_shadows, gate=section.gate, began_at=now, step_began_at=now,
        next_look=section.gate.first_look, epoch=0 if before is None else before.epoch + 1,
        declared=section.stable if declared is None else declared,
    )  # fmt: skip
    if begun.candidate_percent < WHOLE:
        return begun
    return msgspec.structs.replace(begun, status=Status.PROMOTED, reason="its only step was 100 %")


def abort(rollout: Rollout, now: float) -> Rollout:
    """Return the rollout ended by hand: everything goes to the stable version. Raises RequestError."""
    if not rollout.is_running:
        raise RequestError(f"this model's rollout has ended: {rollout.status}")
    return _end(rollout, Status.ABORTED, "aborted by hand", now)


def go_on(rollout: Rollout, evidence: Evidence, now: float) -> Rollout:
    """Return the rollout after another glance at what was seen; the same object where nothing follows from it."""
    if not rollout.is_running:
        return rollout
    num_requests = min(evidence.stable.requests, evidence.candidate.requests)
    if num_requests >= rollout.next_look:
        rollout = _look(rollout, evidence, num_requests)
        if sum_up(rollout.findings) is Verdict.BAD:
            return _end(rollout, Status.ROLLED_BACK, _complaint(rollout), now)
    seconds = now - rollout.step_began_at
    if rollout.has_passed and seconds >= rollout.gate.min_step_seconds:
        return _next_step(rollout, now)
    if seconds >= rollout.gate.max_step_seconds:
        return _end(rollout, Status.ROLLED_BACK, _doubt(rollout, evidence), now)
    return rollout


def _look(rollout: Rollout, evidence: Evidence, num_requests: int) -> Rollout:
    judge = judge_pairs if rollout.is_shadowing else judge_split
    findings = judge(evidence, rollout.gate, rollout.looks + 1)
    has_passed = rollout.has_passed or sum_up(findings) is Verdict.GOOD
    return msgspec.structs.replace(
        rollout, looks=rollout.looks + 1, next_look=2 * num_requests, findings=findings, has_passed=has_passed
    )


def _next_step(rollout: Rollout, now: float) -> Rollout:
    history = [*rollout.history, _report(rollout, "passed", now)]
    following = msgspec.structs.replace(
        rollout, place=rollout.place + 1, epoch=rollout.epoch + 1, step_began_at=now, looks=0, has_passed=False,
        next_look=rollout.gate.first_look, findings=[], history=history,
    )  # fmt: skip
    if following.candidate_percent >= WHOLE:
        return msgspec.structs.replace(following, status=Status.PROMOTED, reason="every step was passed")
    return following


def _end(rollout: Rollout, status: Status, reason: str, now: float) -> Rollout:
    history = [*rollout.history, _report(rollout, reason, now)]
    return msgspec.structs.replace(rollout, status=status, reason=reason, history=history, epoch=rollout.epoch + 1)


def _report(rollout: Rollout, outcome: str, now: float) -> StepReport:
    return StepReport(
        step=rollout.step, began_at=rollout.step_began_at, ended_at=now, looks=rollout.looks, outcome=outcome,
        findings=rollout.findings,
    )  # fmt: skip


def _complaint(rollout: Rollout) -> str:
    worse = [finding for finding in rollout.findings if finding.verdict is Verdict.BAD]
    return "; ".join(f"{item.measure}: at least {item.lower:.3g}, where {item.limit:g} is allowed" for item in worse)


def _doubt(rollout: Rollout, evidence: Evidence) -> str:
    still_open = [item.measure for item in rollout.findings if item.verdict is Verdict.OPEN]
    what = f" of {', '.join(still_open)}" if still_open else ""
    return (
        f"after {rollout.gate.max_step_seconds:g} s and {evidence.candidate.requests} requests to the candidate "
        f"it was not shown to be good enough{what}" + (f"; {evidence.losses}" if evidence.losses else "")
    )
