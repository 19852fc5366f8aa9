"""Gathers, while requests pass, what is seen of two versions; and has some requests answered a second time.

Nothing here is waited for by a caller. Knows nothing of what follows from what it gathers.
"""

from penstock.fleet.replica import Replica
from penstock.fleet.rollout.course import Rollout
from penstock.fleet.rollout.evidence import Arm, Evidence, Loss
from penstock.fleet.rollout.scores import mean_distance
from penstock.fleet.rollout.shadow import ShadowCopy, Shadows
from penstock.fleet.rollout.split import VersionSplit, is_within
from penstock.fleet.rollout.trial import Trial, compare_outputs
from penstock.fleet.router.query import RouteQuery

# Requests that may be answered twice: nothing but their answer comes of them.
_COMPARED_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})


class Trials:
    def __init__(self, split: VersionSplit, shadows: Shadows) -> None:
        self._split = split
        self._shadows = shadows
        self._evidence: dict[str, tuple[int, Evidence]] = {}  # by model: the epoch it belongs to, and what was seen

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
            evidence = self.evidence_of(rollout)
            _note(evidence.candidate if trial.version == rollout.candidate else evidence.stable, trial)
        elif not trial.has_failed and _is_copied(query, rollout):
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
        epoch, evidence = self._evidence.get(rollout.model, (-1, Evidence()))
        if epoch != rollout.epoch:
            evidence = Evidence()
            self._evidence[rollout.model] = rollout.epoch, evidence
        return evidence

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
        if shadow.has_failed:
            return
        times = stable.ttft_seconds, shadow.ttft_seconds
        if times[0] and times[1]:
            evidence.ttft_ratio.add(times[1] / times[0])
        times = stable.time_per_token_seconds(), shadow.time_per_token_seconds()
        if times[0] and times[1]:
            evidence.time_per_token_ratio.add(times[1] / times[0])
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
