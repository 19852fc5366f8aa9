"""Evidence of made-up versions: drawn, not measured."""

import random

from penstock.fleet.rollout.evidence import Arm, Evidence
from penstock.fleet.rollout.plan import GateSection
from penstock.fleet.rollout.trial import Trial
from penstock.fleet.rollout.windows import Windows

ANSWER_TOKENS = 30


class Traffic:
    """Requests in virtual time, and what they show."""

    def __init__(self, seed: int = 0, gate: GateSection | None = None, *, requests_per_window: int = 5) -> None:
        self.evidence = Evidence()
        self._draw = random.Random(seed)
        gate = gate if gate is not None else GateSection()
        self._windows = Windows(self.evidence, gate.window_seconds)
        self._between_seconds = gate.window_seconds / requests_per_window
        self._moment = 0.0

    def pairs(
        self,
        count: int,
        *,
        slowness: float = 1.0,
        error_rate: float = 0.0,
        divergence: float = 0.0,
        logprob_distance: float | None = 0.01,
    ) -> Evidence:
        """Add requests that both versions answered."""
        evidence = self.evidence
        for _ in range(count):
            self._moment += self._between_seconds
            self._note(evidence.stable)
            self._note(evidence.candidate, slowness=slowness, error_rate=error_rate)
            if logprob_distance is not None:
                evidence.logprob_distance.add(logprob_distance * self._draw.lognormvariate(0.0, 0.5))
            evidence.compared_answers += 1
            for _ in range(ANSWER_TOKENS):
                evidence.compared_tokens += 1
                if self._draw.random() < divergence:
                    evidence.divergences += 1
                    break
        return evidence

    def split(self, count: int, *, percent: float = 50.0, **candidate: float) -> Evidence:
        """Add requests that one version or the other answered."""
        for _ in range(count):
            self._moment += self._between_seconds
            if self._draw.random() * 100 < percent:
                self._note(self.evidence.candidate, **candidate)
            else:
                self._note(self.evidence.stable)
        return self.evidence

    def _note(self, arm: Arm, *, slowness: float = 1.0, error_rate: float = 0.0) -> None:
        ttft = 0.2 * self._draw.lognormvariate(0.0, 0.3) * slowness
        per_token = 0.02 * self._draw.lognormvariate(0.0, 0.1) * slowness
        arm.requests += 1
        if self._draw.random() < error_rate:
            arm.errors += 1
            return
        arm.ttft.add(ttft)
        arm.time_per_token.add(per_token)
        first_at = self._moment - per_token * (ANSWER_TOKENS - 1)
        answer = Trial("", began_at=first_at - ttft, first_at=first_at, ended_at=self._moment)
        answer.token_ids = [0] * ANSWER_TOKENS
        self._windows.add(answer, is_candidate=arm is self.evidence.candidate)
