"""Evidence of made-up versions: drawn, not measured."""

import random

from penstock.fleet.rollout.evidence import Arm, Evidence


def note(arm: Arm, draw: random.Random, *, slowness: float = 1.0, error_rate: float = 0.0) -> tuple[float, float]:
    """Add one request; return its two times."""
    ttft = 0.2 * draw.lognormvariate(0.0, 0.3) * slowness
    per_token = 0.02 * draw.lognormvariate(0.0, 0.1) * slowness
    arm.requests += 1
    if draw.random() < error_rate:
        arm.errors += 1
    else:
        arm.ttft.add(ttft)
        arm.time_per_token.add(per_token)
    return ttft, per_token


def add_pairs(
    evidence: Evidence,
    draw: random.Random,
    count: int,
    *,
    slowness: float = 1.0,
    error_rate: float = 0.0,
    divergence: float = 0.0,
    logprob_distance: float | None = 0.01,
    answer_tokens: int = 30,
) -> None:
    """Add requests that both versions answered."""
    for _ in range(count):
        stable, candidate = note(evidence.stable, draw), note(evidence.candidate, draw, slowness=slowness)
        evidence.ttft_ratio.add(candidate[0] / stable[0])
        evidence.time_per_token_ratio.add(candidate[1] / stable[1])
        if draw.random() < error_rate:
            evidence.candidate.errors += 1
        if logprob_distance is not None:
            evidence.logprob_distance.add(logprob_distance * draw.lognormvariate(0.0, 0.5))
        evidence.compared_answers += 1
        for _ in range(answer_tokens):
            evidence.compared_tokens += 1
            if draw.random() < divergence:
                evidence.divergences += 1
                break


def add_split(
    evidence: Evidence, draw: random.Random, count: int, *, percent: float = 50.0, **candidate: float
) -> None:
    """Add requests that one version or the other answered."""
    for _ in range(count):
        if draw.random() * 100 < percent:
            note(evidence.candidate, draw, **candidate)
        else:
            note(evidence.stable, draw)
