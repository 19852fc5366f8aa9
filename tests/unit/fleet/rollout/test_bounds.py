"""Bounds hold as often as they say."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.fleet.rollout.bounds import chance_bounds, divergence, quantile_ranks

COUNTS = st.integers(1, 500).flatmap(lambda trials: st.tuples(st.integers(0, trials), st.just(trials)))


@given(COUNTS, st.floats(1e-6, 0.5))
def test_bounds_of_a_chance_enclose_what_was_seen(counts, level):
    hits, trials = counts
    lower, upper = chance_bounds(hits, trials, level)
    assert 0 <= lower <= hits / trials <= upper <= 1


@given(COUNTS, st.floats(1e-6, 0.4))
def test_more_certainty_and_fewer_trials_widen_the_bounds(counts, level):
    hits, trials = counts
    lower, upper = chance_bounds(hits, trials, level)
    surer = chance_bounds(hits, trials, level / 2)
    longer = chance_bounds(3 * hits, 3 * trials, level)
    assert surer[0] <= lower + 1e-12 and upper <= surer[1] + 1e-12
    assert lower <= longer[0] + 1e-12 and longer[1] <= upper + 1e-12


def test_of_nothing_nothing_is_known():
    assert chance_bounds(0, 0, 0.05) == (0.0, 1.0)
    assert quantile_ranks(0, 0.5, 0.05) == (None, None)


def test_no_hit_in_n_trials_is_the_exact_bound():
    assert chance_bounds(0, 100, 0.01)[1] == pytest.approx(1 - 0.01 ** (1 / 100))


@pytest.mark.parametrize("chance", [0.02, 0.3])
def test_a_bound_of_a_chance_is_wrong_no_more_often_than_it_says(chance):
    draw = random.Random(1)
    wrong_below = wrong_above = 0
    for _ in range(2000):
        hits = sum(draw.random() < chance for _ in range(60))
        lower, upper = chance_bounds(hits, 60, 0.05)
        wrong_below += lower > chance
        wrong_above += upper < chance
    assert wrong_below <= 100 and wrong_above <= 100


@pytest.mark.parametrize("quantile", [0.5, 0.9])
def test_a_bound_of_a_quantile_is_wrong_no_more_often_than_it_says(quantile):
    draw = random.Random(2)
    truth = -math.log(1 - quantile)  # of an exponential distribution
    below, above = quantile_ranks(80, quantile, 0.05)
    wrong_below = wrong_above = 0
    for _ in range(2000):
        values = sorted(draw.expovariate(1.0) for _ in range(80))
        wrong_below += values[below - 1] > truth
        wrong_above += values[above - 1] < truth
    assert 0 < wrong_below <= 100 and 0 < wrong_above <= 100


@given(st.integers(1, 2000), st.floats(0.05, 0.95), st.floats(1e-6, 0.5))
def test_ranks_lie_on_both_sides_of_the_quantile_and_within_the_sample(count, quantile, level):
    below, above = quantile_ranks(count, quantile, level)
    assert below is None or 1 <= below <= count * quantile + 1
    assert above is None or count * quantile <= above <= count


@pytest.mark.parametrize(("count", "is_bounded"), [(4, False), (400, True)])
def test_few_values_bound_no_tail(count, is_bounded):
    assert (quantile_ranks(count, 0.9, 0.001)[1] is not None) is is_bounded


@given(st.floats(0, 1), st.floats(0, 1))
def test_divergence_is_zero_only_of_equals(part, chance):
    assert divergence(part, part) == pytest.approx(0.0, abs=1e-12)
    assert divergence(part, chance) >= 2 * (part - chance) ** 2 - 1e-12
