"""What answers say of their tokens' log-probabilities, and how far two of them are apart."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.fleet.rollout.scores import Score, mean_distance, read_scores

SCORES = st.lists(st.floats(-20, 0), min_size=1, max_size=20)


def answer(*scores, likely=None):
    return [Score(token, logprob, likely or {}) for token, logprob in scores]


def test_both_forms_are_understood():
    likely = [{"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "b", "logprob": -1.5, "bytes": [98]}]
    chat = {"content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": likely}], "refusal": None}
    text = {
        "tokens": ["p", "a"], "token_logprobs": [None, -0.5], "top_logprobs": [None, {"a": -0.5, "b": -1.5}],
        "text_offset": [0, 1],
    }  # fmt: skip
    told = Score("a", -0.5, {"a": -0.5, "b": -1.5})
    assert read_scores(json.dumps(chat).encode()) == [told]
    assert read_scores(json.dumps(text).encode()) == [Score("p", None, {}), told]


@pytest.mark.parametrize("other", [b"null", b"3", b'{"content": 3}', b'{"tokens": ["a"]}', b"{"])
def test_what_is_not_understood_has_no_scores(other):
    assert read_scores(other) == []


@given(SCORES)
def test_equal_answers_are_no_distance_apart(logprobs):
    scores = answer(*((str(place), logprob) for place, logprob in enumerate(logprobs)))
    assert mean_distance(scores, scores) == 0


@given(SCORES, SCORES)
def test_the_distance_of_the_same_tokens_is_the_same_both_ways(ours, theirs):
    one, other = (answer(*((str(place), logprob) for place, logprob in enumerate(item))) for item in (ours, theirs))
    assert mean_distance(one, other) == mean_distance(other, one) >= 0


def test_only_tokens_that_were_written_behind_the_same_ones_are_compared():
    stable = answer(("a", -1.0), ("b", -1.0), ("c", -1.0))
    assert mean_distance(stable, answer(("a", -1.5), ("x", -1.0), ("c", -9.0))) == 0.5
    assert mean_distance(stable, answer(("x", -1.0))) is None
    assert mean_distance([], stable) is None


def test_a_token_that_was_not_chosen_is_compared_where_the_candidate_says_what_it_thinks_of_it():
    stable = answer(("a", -0.5))
    assert mean_distance(stable, answer(("x", -0.1), likely={"x": -0.1, "a": -2.5})) == 2.0
    # It is not among the likely ones, so it is less likely than each of them.
    assert mean_distance(stable, answer(("x", -0.1), likely={"x": -0.1, "y": -3.5})) == 3.0
    assert mean_distance(stable, answer(("x", -0.1), likely={"x": -0.1})) is None


def test_a_token_without_a_score_is_passed_over():
    assert mean_distance(answer(("p", None), ("a", -1.0)), answer(("p", None), ("a", -3.0))) == 2.0
