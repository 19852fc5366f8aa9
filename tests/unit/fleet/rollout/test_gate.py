"""The gate: condemns what is worse, acquits what is not, and is wrong no more often than its error level says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.fleet.rollout.gate import Verdict, judge_pairs, judge_split, level_of, sum_up
from penstock.fleet.rollout.plan import GateSection
from tests.unit.fleet.rollout.simulated_traffic import Traffic

GATE = GateSection()


def of_pairs(count, seed=0, gate=GATE, **candidate):
    return judge_pairs(Traffic(seed, gate).pairs(count, **candidate), gate, 1)


def of_split(count, seed=0, gate=GATE, **candidate):
    return judge_split(Traffic(seed, gate).split(count, **candidate), gate, 1)


def bad_measures(findings):
    return {finding.measure for finding in findings if finding.verdict is Verdict.BAD}


def test_all_looks_together_spend_no_more_than_the_error_level():
    assert sum(level_of(look, GATE) for look in range(1, 10_000)) <= GATE.error_level


@pytest.mark.parametrize("judged", [of_pairs, of_split])
def test_equal_versions_are_good_once_enough_was_seen(judged):
    assert sum_up(judged(16)) is Verdict.OPEN
    assert sum_up(judged(4000)) is Verdict.GOOD


def test_doubled_latency_is_seen_in_few_pairs():
    assert bad_measures(of_pairs(32, slowness=2.0)) == set()
    assert bad_measures(of_pairs(64, slowness=2.0)) == {"ttft p50", "time per token p50"}


def test_one_window_tells_no_more_of_times_for_holding_many_answers():
    evidence = Traffic(requests_per_window=2000).pairs(1000, slowness=2.0)
    assert sum_up(judge_pairs(evidence, GATE, 1)) is Verdict.OPEN


def test_doubled_latency_is_seen_in_a_split():
    assert bad_measures(of_split(400, slowness=2.0)) >= {"ttft p50", "time per token p50", "time per token p90"}


def test_other_answers_are_seen_in_few_pairs():
    assert bad_measures(of_pairs(16, divergence=0.9)) == {"tokens that differ"}


def test_a_rare_difference_between_tokens_is_no_fault():
    assert sum_up(of_pairs(500, divergence=0.001)) is Verdict.GOOD


@pytest.mark.parametrize("judged", [of_pairs, of_split])
def test_more_errors_are_seen(judged):
    assert bad_measures(judged(400, error_rate=0.3)) == {"error rate"}


def test_scores_that_are_far_apart_are_seen_in_few_pairs_and_rounding_is_no_fault():
    assert bad_measures(of_pairs(32, logprob_distance=1.0)) == {"log-probability distance p50"}
    assert sum_up(of_pairs(2000, logprob_distance=0.05)) is Verdict.GOOD


def test_scores_that_hardly_any_answer_tells_are_left_out_unless_they_are_asked_for():
    (finding,) = (item for item in of_pairs(2000, logprob_distance=None) if item.measure.startswith("log-"))
    assert finding.verdict is Verdict.LEFT_OUT
    asking = GateSection(asks_logprobs=True)
    assert sum_up(of_pairs(2000, gate=asking, logprob_distance=None)) is Verdict.OPEN
    assert sum_up(of_pairs(2000, gate=asking)) is Verdict.GOOD


def test_without_answers_to_compare_nothing_is_promoted_unless_the_operator_says_so():
    evidence = Traffic().pairs(2000)
    evidence.compared_answers = evidence.compared_tokens = 0
    assert sum_up(judge_pairs(evidence, GATE, 1)) is Verdict.OPEN
    assert sum_up(judge_pairs(evidence, GateSection(compares_outputs=False), 1)) is Verdict.GOOD


@pytest.mark.parametrize("judge", [judge_pairs, judge_split])
def test_callers_who_do_not_stream_have_no_time_to_first_token_and_it_is_left_out(judge):
    evidence = Traffic().pairs(2000) if judge is judge_pairs else Traffic().split(4000)
    for part in (evidence.stable.ttft, evidence.candidate.ttft, evidence.ttft_ratio, evidence.ttft_tail_ratio):
        part.counts.clear()
    findings = judge(evidence, GATE, 1)
    assert sum_up(findings) is Verdict.GOOD
    assert {item.measure[:4] for item in findings if item.verdict is Verdict.LEFT_OUT} == {"ttft"}


def test_a_candidate_at_its_limits_is_condemned_and_acquitted_no_more_often_than_the_level_says():
    """Both errors, at the worst place for each: exactly at the limit."""
    gate = GateSection(error_level=0.1)
    condemned = acquitted = 0
    for seed in range(150):
        evidence = Traffic(seed, gate, requests_per_window=1).pairs(64, slowness=gate.max_ttft_ratio)
        findings = judge_pairs(evidence, gate, 1)
        condemned += sum_up(findings) is Verdict.BAD
        acquitted += sum_up(findings) is Verdict.GOOD
    assert condemned <= 15 and acquitted <= 15


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.integers(1, 200), st.integers(1, 8))
def test_a_later_look_at_the_same_is_never_surer(seed, count, look):
    evidence = Traffic(seed).pairs(count, slowness=1.3, divergence=0.02)
    sooner, later = judge_pairs(evidence, GATE, look), judge_pairs(evidence, GATE, look + 1)
    for one, other in zip(sooner, later, strict=True):
        assert other.lower <= one.lower
        assert other.upper is None or (one.upper is not None and other.upper >= one.upper)
