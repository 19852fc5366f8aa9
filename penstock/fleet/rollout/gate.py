"""The gate: whether what was seen of a candidate shows that it is good enough, or that it is not.

Each measure has a limit that the candidate must not be worse by. A bound on the wrong side of the limit condemns it, so
that a difference must be large and beyond doubt; all bounds on the right side acquit it; otherwise more must be seen.
The k-th look at a step spends 1/(k(k+1)) of the error level, so that all looks together spend no more than the whole;
it is shared by the measures. Times are judged by their ratios in windows (`windows.py`). Knows nothing of moments,
steps or traffic.
"""

import enum
import math

import msgspec

from penstock.fleet.rollout.bounds import chance_bounds, quantile_ranks
from penstock.fleet.rollout.evidence import MEDIAN, TAIL, Arm, Evidence, Histogram
from penstock.fleet.rollout.plan import GateSection

# A measure that fewer of the stable version's requests have is left out: callers who do not stream have no TTFT.
_LEAST_PART = 0.1
_NUM_PAIRED_MEASURES = 5
_NUM_SPLIT_MEASURES = 5


class Verdict(enum.StrEnum):
    GOOD = "good"
    BAD = "bad"
    OPEN = "open"  # more must be seen
    LEFT_OUT = "left out"  # hardly any request has it


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One measure, as one look found it."""

    measure: str
    stable: float | None
    candidate: float | None
    lower: float | None  # the candidate's worsening is at least this, and at most `upper`
    upper: float | None
    limit: float
    num_values: int
    verdict: Verdict


def level_of(look: int, gate: GateSection) -> float:
    """Return the part of the error level that the look of this number, from 1, may spend."""
    return gate.error_level / (look * (look + 1))


def judge_pairs(evidence: Evidence, gate: GateSection, look: int) -> list[Finding]:
    """Judge what requests that both versions answered show."""
    level = level_of(look, gate) / (2 * _NUM_PAIRED_MEASURES)
    findings = _times(evidence, gate, level, has_tails=False)
    findings.append(_errors(evidence.stable, evidence.candidate, gate, level))
    if gate.compares_outputs:
        findings.append(_outputs(evidence, gate, level))
        findings.append(_logprobs(evidence, gate, level))
    return findings


def judge_split(evidence: Evidence, gate: GateSection, look: int) -> list[Finding]:
    """Judge what requests that went to one version or the other show."""
    level = level_of(look, gate) / (2 * _NUM_SPLIT_MEASURES)
    findings = _times(evidence, gate, level, has_tails=True)
    findings.append(_errors(evidence.stable, evidence.candidate, gate, level))
    return findings


def sum_up(findings: list[Finding]) -> Verdict:
    """Return what the findings say together: bad if one does, good only if all do."""
    verdicts = {finding.verdict for finding in findings} - {Verdict.LEFT_OUT}
    if Verdict.BAD in verdicts:
        return Verdict.BAD
    return Verdict.GOOD if verdicts == {Verdict.GOOD} else Verdict.OPEN


def _times(evidence: Evidence, gate: GateSection, level: float, *, has_tails: bool) -> list[Finding]:
    """Judge how much slower the candidate is in the window in the middle, half of them being worse."""
    stable, candidate = evidence.stable, evidence.candidate
    tokens = stable.time_per_token, candidate.time_per_token, gate.max_time_per_token_ratio
    measures = [
        ("ttft", MEDIAN, evidence.ttft_ratio, stable.ttft, candidate.ttft, gate.max_ttft_ratio),
        ("ttft", TAIL, evidence.ttft_tail_ratio, stable.ttft, candidate.ttft, gate.max_ttft_ratio),
        ("time per token", MEDIAN, evidence.time_per_token_ratio, *tokens),
        ("time per token", TAIL, evidence.time_per_token_tail_ratio, *tokens),
    ]
    findings = []
    for name, part, ratios, of_stable, of_candidate, limit in measures if has_tails else measures[::2]:
        values = of_stable.quantile(part), of_candidate.quantile(part)
        bounds = _quantile_bounds(ratios, MEDIAN, level)
        finding = _finding(f"{name} p{part * 100:g}", values, bounds, limit, ratios.num_values, 0)
        is_told = of_stable.num_values >= _LEAST_PART * stable.requests
        findings.append(finding if is_told else msgspec.structs.replace(finding, verdict=Verdict.LEFT_OUT))
    return findings


def _errors(stable: Arm, candidate: Arm, gate: GateSection, level: float) -> Finding:
    lower_stable, upper_stable = chance_bounds(stable.errors, stable.requests, level)
    lower_candidate, upper_candidate = chance_bounds(candidate.errors, candidate.requests, level)
    values = _part(stable.errors, stable.requests), _part(candidate.errors, candidate.requests)
    bounds = lower_candidate - upper_stable, upper_candidate - lower_stable
    return _finding("error rate", values, bounds, gate.max_error_increase, candidate.requests, 0)


def _outputs(evidence: Evidence, gate: GateSection, level: float) -> Finding:
    bounds = chance_bounds(evidence.divergences, evidence.compared_tokens, level)
    values = None, _part(evidence.divergences, evidence.compared_tokens)
    return _finding("tokens that differ", values, bounds, gate.max_divergence, evidence.compared_tokens, 0)


def _logprobs(evidence: Evidence, gate: GateSection, level: float) -> Finding:
    distance = evidence.logprob_distance
    bounds, values = _quantile_bounds(distance, MEDIAN, level), (None, distance.quantile(MEDIAN))
    # Where they are asked for on purpose, their absence is no reason to do without them.
    num_pairs = 0 if gate.asks_logprobs else evidence.candidate.requests
    return _finding(
        "log-probability distance p50", values, bounds, gate.max_logprob_distance, distance.num_values, num_pairs
    )


def _finding(
    name: str,
    values: tuple[float | None, float | None],
    bounds: tuple[float, float],
    limit: float,
    num_values: int,
    num_requests: int,
) -> Finding:
    lower, upper = bounds
    verdict = Verdict.BAD if lower > limit else Verdict.GOOD if upper <= limit else Verdict.OPEN
    if num_requests and num_values < _LEAST_PART * num_requests:
        verdict = Verdict.LEFT_OUT
    return Finding(
        measure=name, stable=values[0], candidate=values[1], lower=lower, upper=upper if upper < math.inf else None,
        limit=limit, num_values=num_values, verdict=verdict,
    )  # fmt: skip


def _quantile_bounds(histogram: Histogram, part: float, level: float) -> tuple[float, float]:
    below, above = quantile_ranks(histogram.num_values, part, level)
    lower = 0.0 if below is None else histogram.edges(below)[0]
    return lower, math.inf if above is None else histogram.edges(above)[1]


def _part(count: int, whole: int) -> float | None:
    return count / whole if whole else None
