"""What foreign answers cost, read from what they say."""

import itertools
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import RequestError
from penstock.fleet.router.foreign_usage import UsageReader, asking_for_usage, need_of, read_whole
from penstock.fleet.router.query import read_head
from penstock.telemetry import RequestRecord

SAYS_USAGE = rb'data: {"choices": [{"index": 0, "text": "they say \"usage\": {\"prompt_tokens\": 9}"}]}'
STREAM = [
    b'data: {"choices": [{"index": 0, "delta": {"role": "assistant"}}], "usage": null}',
    b": ping",
    SAYS_USAGE,
    b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}',
    b"data: [DONE]",
]


def record():
    return RequestRecord("id", "POST", "/", 0.0, prompt_tokens=1)


def need(**fields):
    return need_of(read_head(msgspec.json.encode({"model": "m", **fields})), 100)


@given(
    st.sampled_from([b"\n\n", b"\r\n\r\n"]),
    st.lists(st.integers(0, 400), max_size=12),
    st.booleans(),
)
def test_however_a_stream_is_cut_up_it_passes_whole_and_tells_its_cost(end, cuts, hides):
    events = [event + end for event in STREAM]
    data = b"".join(events)
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    noted = record()
    reader = UsageReader(noted, hides_usage=hides)
    passed = b"".join(reader.feed(data[a:b]) for a, b in itertools.pairwise(places))
    assert b"[DONE]" not in passed
    assert passed + reader.last_bytes() == b"".join(events[:3] + (events[3:] if not hides else events[4:]))
    reader.note_cost()
    assert (noted.prompt_tokens, noted.output_tokens, noted.usage_source) == (3, 2, "")


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("num_cut", [1, 2, 3, 500_000])
def test_an_event_that_is_too_large_to_be_looked_at_passes_whole(end, num_cut):
    events = [STREAM[0] + end, b"data: " + b"x" * 1_500_000 + STREAM[3] + end, STREAM[2] + end, STREAM[3] + end]
    data = b"".join(events)
    ends = set(itertools.accumulate(len(event) for event in events))
    near_ends = {end - back for end in ends for back in range(6)} if num_cut < 6 else set()
    places = sorted({0, len(data), *range(0, len(data), 500_000), *(at for at in near_ends if at % num_cut == 0)})
    noted = record()
    reader = UsageReader(noted, hides_usage=True)
    passed = b"".join(reader.feed(data[a:b]) for a, b in itertools.pairwise(places))
    assert passed + reader.last_bytes() == b"".join(events[:3])
    assert (noted.prompt_tokens, noted.output_tokens) == (3, 2)


def test_what_stands_within_a_line_is_no_usage():
    data = b"x" + STREAM[3] + b"\n\n"
    reader = UsageReader(record(), hides_usage=True)
    assert reader.feed(data) + reader.last_bytes() == data


@pytest.mark.parametrize(
    ("fields", "input_tokens", "most", "answers"),
    [
        ({"prompt": "x" * 10, "max_tokens": 6}, 3, 6, 1),
        ({"prompt": [1, 2, 3], "max_tokens": 6, "n": 2}, 3, 12, 2),
        ({"prompt": [[1, 2], [3]], "max_tokens": 6}, 3, 12, 2),
        ({"prompt": ["x" * 8, "y" * 4], "max_tokens": 6, "n": 2}, 3, 24, 4),
        ({"messages": [{"role": "user", "content": "x" * 12}], "max_completion_tokens": 4, "max_tokens": 9}, 3, 4, 1),
        ({"messages": [{"content": [{"type": "text", "text": "x" * 12}, {"type": "image_url"}]}]}, 3, 97, 1),
        ({"input": "x" * 12, "max_tokens": "many"}, 3, 97, 1),
    ],
)
def test_what_a_request_may_use_is_told_by_its_body(fields, input_tokens, most, answers):
    found = need(**fields)
    assert (found.input_tokens, found.most_output_tokens, found.num_answers) == (input_tokens, most, answers)
    assert found.output_is_stated == (most not in (97,))


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"model": "m", "prompt": ' + b"[" * 100_000])
def test_a_body_that_is_nested_too_deeply_is_its_callers_mistake(body):
    with pytest.raises(RequestError):
        read_head(body)


@pytest.mark.parametrize(
    ("fields", "context", "least", "is_stated"),
    [
        ({"min_tokens": 40}, 100, 40, False),
        ({"min_tokens": 40, "n": 2}, 100, 80, False),
        ({"min_tokens": 400}, 100, 97, True),
        ({"min_tokens": True}, 100, 0, False),
        ({"min_tokens": 40}, None, 40, False),
        ({"ignore_eos": True}, 100, 97, True),
        ({"ignore_eos": True, "stop": ["x"], "min_tokens": 5}, 100, 5, False),
        ({"ignore_eos": True, "stop_token_ids": [7]}, 100, 0, False),
        ({"ignore_eos": True}, None, 0, False),
    ],
)
def test_what_an_answer_has_for_certain_is_reserved(fields, context, least, is_stated):
    head = read_head(msgspec.json.encode({"model": "m", "prompt": [1, 2, 3], **fields}))
    found = need_of(head, context)
    assert (found.least_output_tokens, found.output_is_stated) == (least, is_stated)


def test_asking_for_usage_keeps_what_was_asked_before():
    body = asking_for_usage(b'{"model": "m", "stream_options": {"other": 1}}')
    assert msgspec.json.decode(body) == {"model": "m", "stream_options": {"other": 1, "include_usage": True}}


@pytest.mark.parametrize("body", [b"", b"[]", b'{"usage": 5}', b'{"choices": [5]}', b'{"x":' + b"[" * 20000])
def test_a_body_that_tells_nothing_is_estimated(body):
    noted = record()
    read_whole(body, noted)
    assert (noted.prompt_tokens, noted.output_tokens, noted.usage_source) == (1, 0, "estimate")


def test_the_names_of_newer_apis_are_read_too():
    noted = record()
    read_whole(b'{"usage": {"input_tokens": 4, "output_tokens": 6}}', noted)
    assert (noted.prompt_tokens, noted.output_tokens, noted.usage_source) == (4, 6, "")


@pytest.mark.parametrize("counts", [(10**30, 1), (5, 10**30), (-5, 1), (5, -9)])
def test_counts_that_cannot_be_are_taken_for_none(counts):
    told = {"prompt_tokens": counts[0], "completion_tokens": counts[1]}
    body = msgspec.json.encode({"choices": [{"text": "x" * 8}]})[:-1] + b', "usage": %b}' % json.dumps(told).encode()
    noted = record()
    read_whole(body, noted)
    assert (noted.prompt_tokens, noted.output_tokens, noted.usage_source) == (1, 2, "estimate")
    noted = record()
    reader = UsageReader(noted, hides_usage=True)
    reader.feed(b"data: " + body + b"\n\n")
    reader.note_cost()
    assert (noted.prompt_tokens, noted.output_tokens, noted.usage_source) == (1, 1, "estimate")


ODD = [b'"20"', b"true", b"20.5", b"[1]", b'{"n": 20}', b"1e999"]


@pytest.mark.parametrize(
    "usage", [b"[1]", b"7", b'"none"', *[b'{"prompt_tokens": 9, "completion_tokens": %b}' % x for x in ODD]]
)
def test_usage_that_cannot_be_read_does_not_make_an_answer_free(usage):
    noted = record()
    read_whole(b'{"choices": [{"text": "xxxxxxxx"}], "usage": %b}' % usage, noted)
    assert (noted.prompt_tokens, noted.output_tokens, noted.usage_source) == (1, 2, "estimate")


@pytest.mark.parametrize("value", ODD)
def test_usage_of_a_stream_that_cannot_be_read_counts_as_none(value):
    noted = record()
    reader = UsageReader(noted, hides_usage=True)
    reader.feed(SAYS_USAGE + b"\n\n")
    assert reader.feed(b'data: {"choices": [], "usage": {"completion_tokens": %b}}\n\n' % value) == b""
    reader.note_cost()
    assert (noted.prompt_tokens, noted.output_tokens, noted.usage_source) == (1, 1, "estimate")


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        (b'{"prompt_tokens": 10.0, "completion_tokens": 20.0}', (10, 20, "")),
        (b'{"completion_tokens": 20}', (1, 20, "estimate")),
        (b'{"prompt_tokens": 10, "completion_tokens": null}', (10, 1, "estimate")),
    ],
)
def test_of_what_is_told_each_count_is_taken_and_the_other_estimated(usage, counts):
    noted = record()
    read_whole(b'{"choices": [{"text": "xxxx"}], "usage": %b}' % usage, noted)
    assert (noted.prompt_tokens, noted.output_tokens, noted.usage_source) == counts
    noted = record()
    reader = UsageReader(noted, hides_usage=True)
    reader.feed(SAYS_USAGE + b'\n\ndata: {"choices": [], "usage": %b}\n\n' % usage)
    reader.note_cost()
    assert (noted.prompt_tokens, noted.output_tokens, noted.usage_source) == counts


def test_an_answer_without_choices_has_told_all_with_its_prompt():
    noted = record()
    read_whole(b'{"data": [], "usage": {"prompt_tokens": 8, "total_tokens": 8}}', noted)
    assert (noted.prompt_tokens, noted.output_tokens, noted.usage_source) == (8, 0, "")


@pytest.mark.parametrize(("told", "cached"), [(-7, 0), (10**30, 4), (3, 3)])
def test_no_more_and_no_less_is_cached_than_can_be(told, cached):
    noted = record()
    usage = {"prompt_tokens": 4, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": told}}
    read_whole(json.dumps({"usage": usage}).encode(), noted)
    assert (noted.prompt_tokens, noted.cached_tokens) == (4, cached)
