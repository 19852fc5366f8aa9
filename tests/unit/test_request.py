"""Sampling parameters are refused by name, value and what would be right."""

import math
from typing import Any

import msgspec
import pytest

from penstock.errors import InvalidParameter
from penstock.request import MAX_LOGPROBS, FinishReason, SamplingParams

VOCAB = 100


def test_the_defaults_are_usable() -> None:
    SamplingParams().validate(VOCAB)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.0},
        {"temperature": 2.0},
        {"top_p": 1e-6},
        {"min_p": 1.0},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"repetition_penalty": 10.0},
        {"max_tokens": 1, "min_tokens": 1},
        {"top_k": 0},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"logprobs": MAX_LOGPROBS},
        {"prompt_logprobs": MAX_LOGPROBS},
        {"logit_bias": {0: -100.0, VOCAB - 1: 100.0}},
        {"stop_token_ids": (0, VOCAB - 1)},
        {"stop_token_ids": tuple(range(VOCAB))},
        {"min_tokens": 1, "stop_token_ids": tuple(range(1, VOCAB))},
    ],
)
def test_values_at_the_limits_are_usable(values: dict[str, Any]) -> None:
    SamplingParams(**values).validate(VOCAB)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"temperature": -0.01}, "temperature"),
        ({"temperature": 2.01}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -math.inf}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"top_k": -1}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"logprobs": MAX_LOGPROBS + 1}, "logprobs"),
        ({"prompt_logprobs": MAX_LOGPROBS + 1}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"min_tokens": 1, "stop_token_ids": tuple(range(VOCAB))}, "min_tokens"),
    ],
)
def test_a_value_beyond_its_limits_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**values).validate(VOCAB)
    assert caught.value.param == named
    assert str(caught.value).startswith(f"{named}: ")
    assert "is not usable; give" in str(caught.value)


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
def test_a_value_of_a_wrong_type_is_told_the_right_one_in_words(name: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^{name}: .* is not usable; give (an|a|True) [^\\[|]*$"):
        SamplingParams(**{name: object()}).plain()


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "top_k"])
def test_a_count_that_is_too_large_is_told_the_limit(name: str) -> None:
    with pytest.raises(InvalidParameter, match="to 2147483647"):
        SamplingParams(**{name: 10**30}).validate(VOCAB)


def test_a_temperature_of_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0.0).greedy
    assert not SamplingParams(temperature=0.1).greedy


@pytest.mark.parametrize(
    "values", [{"presence_penalty": 0.5}, {"frequency_penalty": -1.0}, {"repetition_penalty": 1.2}]
)
def test_any_penalty_counts_as_penalties(values: dict[str, float]) -> None:
    assert SamplingParams(**values).has_penalties
    assert not SamplingParams().has_penalties


def test_parameters_survive_the_wire() -> None:
    params = SamplingParams(max_tokens=5, logit_bias={7: -1.5}, stop=("a", "b"), stop_token_ids=(1, 2), seed=-3)
    frame = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(frame, type=SamplingParams) == params


def test_finish_reasons_are_stable() -> None:
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort", "error"]
