"""Requests as bytes: closed, strict, and refused with the parameter's place."""

import contextlib
import importlib
import json
import pkgutil
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock import protocol
from penstock.errors import InvalidParameter, MalformedBody, RequestError, UnsupportedParameter
from penstock.protocol import wire
from penstock.protocol.openai_chat import ChatRequest
from penstock.protocol.openai_completions import CompletionRequest
from penstock.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from penstock.protocol.wire import WireModel, most_entries, parse_request

USER = {"role": "user", "content": "x"}


def chat(**fields):
    return parse_request(ChatRequest, json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def completion(**fields):
    return parse_request(CompletionRequest, json.dumps({"model": "m", "prompt": "x", **fields}).encode())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.sampled_from([ChatRequest, CompletionRequest, TokenizeRequest]), st.binary(max_size=50))
def test_any_bytes_give_a_request_or_a_request_error(kind, body):
    with contextlib.suppress(RequestError):
        parse_request(kind, body)


@given(
    st.dictionaries(st.sampled_from(sorted(ChatRequest.model_fields)) | st.text(max_size=5), json_values, max_size=4)
)
def test_any_json_object_gives_a_request_or_a_request_error(fields):
    with contextlib.suppress(RequestError):
        chat(**fields).sampling_params(max_tokens=1, logprobs=None)


def test_one_stop_text_is_a_list_of_one():
    assert chat(stop="a").stop == ["a"]
    assert chat(stop=["a", "b"]).sampling_params(max_tokens=None, logprobs=None).stop == ("a", "b")


def test_text_parts_are_joined_by_line_breaks():
    parts = [{"type": "text", "text": "a", "prompt_cache_breakpoint": {}}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "a\nb"


@pytest.mark.parametrize("field", ["name", "tool_call_id"])
def test_names_in_a_message_are_short(field):
    message = chat(messages=[{**USER, field: "é" * 64}]).messages[0]
    assert message.num_characters == len(USER["content"]) + 64
    with pytest.raises(InvalidParameter, match=rf"messages\[0\].{field}: .* give at most 64 characters"):
        chat(messages=[{**USER, field: "n" * 65}])


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_every_form_of_prompt_becomes_a_list_of_prompts(prompt, expected):
    assert completion(prompt=prompt).prompt == expected


@pytest.mark.parametrize("prompt", [[], [1, "a"], [[1], "a"], [True], {"a": 1}, None, 5, [1.0]])
def test_any_other_prompt_is_refused(prompt):
    with pytest.raises(InvalidParameter, match="prompt"):
        completion(prompt=prompt)


def test_a_refused_field_that_asks_for_nothing_is_accepted():
    assert chat(tools=[], response_format={"type": "text"}, tool_choice=None).model == "m"
    with pytest.raises(UnsupportedParameter, match="tools"):
        chat(tools=[1])


@pytest.mark.parametrize("value", ["auto", "required", {"type": "function", "function": {"name": "f"}}, 5])
def test_a_choice_of_tools_is_refused_where_there_are_none_to_choose_from(value):
    assert chat(tool_choice="none", function_call="none").model == "m"
    for name in ("tool_choice", "function_call"):
        with pytest.raises(UnsupportedParameter, match=name):
            chat(**{name: value})


def test_token_biases_become_numbers():
    assert chat(logit_bias={"0": 1, "70": -2.5}).sampling_params(max_tokens=1, logprobs=None).logit_bias == {
        0: 1,
        70: -2.5,
    }
    for key in ("-1", "1.5", "x", "", "१", "9" * 30, "01", "00", "+1", " 1", "1 ", "1\n", "1_0", "1e1"):
        with pytest.raises(InvalidParameter, match="logit_bias"):
            chat(logit_bias={key: 1}).sampling_params(max_tokens=1, logprobs=None)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"stop": 5}, "stop: 5 is not usable; give a string or a list of strings"),
        ({"stop": [True]}, "stop[0]: true is not usable; give a string"),
        ({"user": 5}, "user: 5 is not usable; give a string"),
        ({"store": "yes"}, 'store: "yes" is not usable; give true or false'),
        ({"metadata": []}, "metadata: [] is not usable; give an object"),
        ({"metadata": {"a": 1}}, "metadata.a: 1 is not usable; give a string"),
        ({"stop": ["a", "b\0"]}, 'stop[1]: "b\\u0000" is not usable; send texts without NUL characters'),
        ({"metadata": {"\0": "a"}}, 'metadata: "\\u0000" is not usable; send texts without NUL characters'),
        ({"messages": []}, "messages: [] is not usable; give at least 1 entry"),
        ({"stop": ["a"] * 17}, "give at most 16 entries"),
        ({"stop": [""]}, 'stop[0]: "" is not usable; give at least 1 character'),
        ({"messages": [{"role": "user", "content": 5}]}, "5 is not usable; give a string or a list of parts such as"),
        ({"messages": [{"role": "user", "content": None}]}, "null is not usable; give a string or a list of parts"),
    ],
)
def test_a_refusal_shows_the_value_as_json_and_says_what_would_be_right(fields, sentence):
    with pytest.raises(InvalidParameter) as refused:
        chat(**fields)
    assert sentence in str(refused.value)


def test_the_place_of_a_nul_is_told_however_deep_it_is():
    deep = "a\0"
    for _ in range(3):
        deep = {"x": [1, deep]}
    with pytest.raises(InvalidParameter, match=re.escape("stop.x[1].x[1].x[1]: ")):
        chat(stop=deep)


def test_the_search_for_nul_calls_nothing_for_each_token_id():
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        wire.refuse_nul({"prompt": [1] * 1000}, ())
    finally:
        sys.setprofile(None)
    assert 0 < len(calls) < 10


def test_a_text_that_tells_of_nul_is_one_like_others():
    assert chat(stop="\\u0000").stop == ["\\u0000"]


def test_the_newer_length_limit_is_told_its_bounds():
    with pytest.raises(InvalidParameter, match=r"max_completion_tokens: .* give an integer from 1 to 2147483647"):
        chat(max_completion_tokens=2**70).answer_limit()


def test_a_long_value_is_shortened_in_the_message():
    with pytest.raises(InvalidParameter) as refused:
        chat(temperature="x" * 10_000)
    assert len(str(refused.value)) < 200


def test_a_long_unknown_name_is_shortened_in_the_message():
    with pytest.raises(RequestError) as refused:
        chat(**{"x" * 10_000: 1})
    assert len(str(refused.value)) < 300


MANY = 400_000
CROWDED = {
    "objects": b'{"messages": [' + b"{}," * MANY + b"{}]}",
    "numbers": b'{"messages": [' + b"1," * 3 * MANY + b"1]}",
    "fields": b'{"messages": [{' + b'"a":1,' * MANY + b'"a":1}]}',
    "lists": b'{"messages": [' + b"[1]," * MANY + b"[1]]}",
    "escapes": b'{"messages": "' + rb"\n" * 2 * MANY + b'"}',
}


@pytest.mark.parametrize("body", CROWDED.values(), ids=CROWDED)
def test_a_body_of_far_too_many_parts_is_refused_before_it_is_read(body, monkeypatch):
    monkeypatch.setattr(wire, "from_json", None)
    with pytest.raises(RequestError, match="too many parts"):
        parse_request(ChatRequest, body)


@pytest.mark.parametrize("at", [0, 2**19 - 2, 2**19 - 1])
def test_parts_are_counted_once_also_where_one_lies_over_the_end_of_what_is_counted_at_once(at):
    body = b"x" * at + b'":' * 2**16
    with pytest.raises(MalformedBody):
        parse_request(ChatRequest, body)
    with pytest.raises(RequestError, match="too many parts"):
        parse_request(ChatRequest, body + b'":')


def test_a_list_of_token_ids_that_fits_the_context_is_read():
    body = json.dumps({"model": "m", "prompt": [1] * 300_000}).encode()
    with pytest.raises(RequestError, match="at most 262144 entries"):
        parse_request(CompletionRequest, body, max_entries=most_entries(131_072))
    assert len(parse_request(CompletionRequest, body, max_entries=most_entries(300_000)).prompt[0]) == 300_000


FIELDS = {str(number): "" for number in range(2000)}
PARTS = [{"type": "text", "text": ""}] * 8193


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (ChatRequest, {"messages": [1] * 10_000}, "messages[0]"),
        (ChatRequest, {"messages": [USER] * 8193}, "messages"),
        (ChatRequest, {"messages": [{"role": "user", "content": PARTS}]}, "messages[0].content"),
        (ChatRequest, {"messages": [FIELDS]}, "messages[0]"),
        (ChatRequest, {"messages": [USER], "stream_options": FIELDS}, "stream_options"),
        (ChatRequest, {"messages": [USER], "logit_bias": FIELDS}, "logit_bias"),
        (ChatRequest, {"messages": [USER], "metadata": FIELDS}, "metadata"),
        (CompletionRequest, {"prompt": [[1]] * 129}, "prompt"),
        (DetokenizeRequest, {"tokens": [{}] * 10_000}, "tokens[0]"),
    ],
)
def test_a_long_list_of_mistakes_is_reported_as_one(kind, fields, param):
    body = json.dumps({"model": "m", **fields}).encode()
    with pytest.raises(RequestError) as caught:
        parse_request(kind, body)
    assert (caught.value.param or "").startswith(param)
    errors = 0
    try:
        kind.model_validate(json.loads(body))
    except ValidationError as error:
        errors = error.error_count()
    assert 1 <= errors <= 2


def request_models(kind=WireModel):
    """Return all models of requests and of their parts."""
    for module in pkgutil.iter_modules(protocol.__path__, f"{protocol.__name__}."):
        importlib.import_module(module.name)
    return [kind, *(model for below in kind.__subclasses__() for model in request_models(below))]


WRONG = object()
CROWDS = {
    "list": [WRONG] * 5000,
    "list of lists": [[WRONG] * 5000],
    "mapping": dict.fromkeys(map(str, range(5000)), WRONG),
}


@pytest.mark.parametrize("crowd", CROWDS.values(), ids=CROWDS)
@pytest.mark.parametrize("kind", request_models(), ids=lambda kind: kind.__name__)
def test_no_field_of_any_request_reports_a_crowd_of_mistakes_one_by_one(kind, crowd):
    for name in kind.model_fields:
        with pytest.raises(ValidationError) as refused:
            kind.model_validate({name: crowd})
        reported = [mistake["loc"] for mistake in refused.value.errors() if mistake["loc"][0] == name]
        assert len(reported) == 1, reported[:3]


def test_a_large_wrong_value_is_shown_by_its_beginning_only():
    error = InvalidParameter("seed", [[1] * 10] * 10**6, "give a number")
    assert str(error).startswith("seed: [[1, 1, ")
    assert len(str(error)) < 200
