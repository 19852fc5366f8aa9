"""Gathers, while requests pass, what is seen of two versions; and has some requests answered a second time.

Nothing here is waited for by a caller. Knows nothing of what follows from what it gathers.
"""

from dataclasses import dataclass

from penstock.fleet.replica import Replica
from penstock.fleet.rollout.course import Rollout
from penstock.fleet.rollout.evidence import Arm, Evidence, Loss
from penstock.fleet.rollout.scores import mean_distance
from penstock.fleet.rollout.shadow import ShadowCopy, Shadows
from penstock.fleet.rollout.split import VersionSplit, is_within
from penstock.fleet.rollout.trial import Trial, compare_outputs
from penstock.fleet.rollout.windows import Windows
from penstock.fleet.router.query import RouteQuery

# Requests that may be answered twice: nothing but their answer comes of them.
_COMPARED_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})


@dataclass(frozen=True, slots=True)
class _Gathered:
    """What was seen in one step of one rollout."""

    epoch: int
    evidence: Evidence
    windows: Windows


class Trials:
    def __init__(self, split: VersionSplit, shadows: Shadows) -> None:
        self._split = split
        self._shadows = shadows
        self._gathered: dict[str, _Gathered] = {}  # by model

    def begin(self, query: RouteQuery, replica: Replica) -> Trial | None:
        """Return what to measure a request's answer with, or None where nothing is compared."""
        rollout = self._split.rollout_of(query.model)
        if rollout is None or not rollout.is_running or replica.version not in (rollout.stable, rollout.candidate):
            return None
        if not self._split.is_drawn(query) or self._split.versions_for(query)[0] != replica.version:
            return None
        is_copied = _is_copied(query, rollout)
        return Trial(replica.version, keeps_text=is_copied, has_scores=is_copied and query.wants_logprobs)

    def end(self, query: RouteQuery, trial: Trial, copy: ShadowCopy) -> None:
        """Take a request's answer in, and perhaps have the candidate answer it too."""
        rollout = self._split.rollout_of(query.model)
        if rollout is None or not rollout.is_running or not trial.is_measured or copy.path not in _COMPARED_PATHS:
            return
        if not rollout.is_shadowing:
            evidence, is_candidate = self.evidence_of(rollout), trial.version == rollout.candidate
            _note(evidence.candidate if is_candidate else evidence.stable, trial)
            self._gathered_of(rollout).windows.add(trial, is_candidate=is_candidate)
        elif _is_copied(query, rollout) and trial.has_failed:
            # There is nothing to compare a copy with; but what fails here may fail there for the same reason.
            _note(self.evidence_of(rollout).stable, trial)
        elif _is_copied(query, rollout):
            # Now, and not with its copy, which comes later: perhaps to a busier machine.
            self._gathered_of(rollout).windows.add(trial, is_candidate=False)
            self._shadows.send(
                copy,
                rollout,
                lambda shadow: self._note_pair(rollout, trial, shadow, copy),
                lambda loss: self._note_loss(rollout, loss),
                has_scores=trial.has_scores,
            )
            if rollout.gate.asks_logprobs and not trial.has_scores:
                self._score(copy.asking_for_logprobs(), rollout)

    def evidence_of(self, rollout: Rollout) -> Evidence:
        """Return what this gateway has seen in the step that a rollout is in."""
        return self._gathered_of(rollout).evidence

    def _gathered_of(self, rollout: Rollout) -> "_Gathered":
        gathered = self._gathered.get(rollout.model)
        if gathered is None or gathered.epoch != rollout.epoch:
            evidence = Evidence()
            gathered = _Gathered(rollout.epoch, evidence, Windows(evidence, rollout.gate.window_seconds))
            self._gathered[rollout.model] = gathered
        return gathered

    def _score(self, copy: ShadowCopy, rollout: Rollout) -> None:
        """Have both versions answer a copy with log-probabilities, one after the other: only these are compared."""

        def lost(loss: Loss) -> None:
            self._note_loss(rollout, loss)

        def go_on(shadow: Trial) -> None:
            if not shadow.has_failed:
                self._shadows.send(
                    copy,
                    rollout,
                    lambda stable: self._note_scores(rollout, stable, shadow),
                    lost,
                    version=rollout.stable,
                    has_scores=True,
                )

        self._shadows.send(copy, rollout, go_on, lost, has_scores=True)

    def _note_loss(self, rollout: Rollout, loss: Loss) -> None:
        if self._is_current(rollout):
            self.evidence_of(rollout).lose(loss)

    def _is_current(self, rollout: Rollout) -> bool:
        """Whether the step that something belongs to goes on."""
        now = self._split.rollout_of(rollout.model)
        return now is not None and now.epoch == rollout.epoch

    def _note_scores(self, rollout: Rollout, stable: Trial, shadow: Trial) -> None:
        distance = mean_distance(stable.scores(), shadow.scores())
        if distance is not None and self._is_current(rollout):
            self.evidence_of(rollout).logprob_distance.add(distance)

    def _note_pair(self, rollout: Rollout, stable: Trial, shadow: Trial, copy: ShadowCopy) -> None:
        if not self._is_current(rollout):
            return
        evidence = self.evidence_of(rollout)
        _note(evidence.stable, stable)
        _note(evidence.candidate, shadow)
        self._gathered_of(rollout).windows.add(shadow, is_candidate=True)
        if shadow.has_failed:
            return
        compared = compare_outputs(stable, shadow) if copy.is_repeatable(stable, shadow) else None
        if compared is not None:
            num_tokens, differs = compared
            evidence.compared_answers += 1
            evidence.compared_tokens += num_tokens
            evidence.divergences += int(differs)
        self._note_scores(rollout, stable, shadow)


def _is_copied(query: RouteQuery, rollout: Rollout) -> bool:
    return rollout.is_shadowing and is_within(query, rollout.candidate, rollout.shadow_percent)


def _note(arm: Arm, trial: Trial) -> None:
    arm.requests += 1
    arm.errors += int(trial.has_failed)
    ttft, per_token = trial.ttft_seconds, trial.time_per_token_seconds()
    if ttft is not None and not trial.was_hindered:
        arm.ttft.add(ttft)
    if per_token is not None:
        arm.time_per_token.add(per_token)
