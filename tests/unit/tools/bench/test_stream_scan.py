"""Tokens are found in a stream however it is cut, and its end is understood."""

import pytest

from penstock.tools.bench.stream_scan import MAX_LINE_BYTES, StreamScan

COMPLETION = (
    b'data: {"choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null}]}\n\n'
    b'data: {"choices": [{"text": " \\"text\\": \\"b", "finish_reason": null}]}\n\n'
    b'data: {"choices":[{"index":0,"text":"","logprobs":null,"finish_reason":null}]}\n\n'
    b'data: {"choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":2}}}\n\n'
    b"data: [DONE]\n\n"
)
CHAT = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
    b'data: {"choices":[{"delta":{"reasoning_content":"hm"},"finish_reason":null}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\n\n'
    b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
    b"data: [DONE]\n\n"
)


def scan(stream: bytes, size: int, *, chat: bool = False) -> StreamScan:
    made = StreamScan(chat=chat)
    for start in range(0, len(stream), size):
        assert made.push(stream[start : start + size], float(start))
    return made


@pytest.mark.parametrize("size", [1, 7, 64, 100, 10_000])
def test_a_completions_tokens_are_counted_however_the_bytes_are_cut(size: int) -> None:
    made = scan(COMPLETION, size)
    assert len(made.token_times) == 3
    ending = made.end()
    assert ending.is_whole
    assert ending.output_tokens == 3


@pytest.mark.parametrize("size", [7, 10_000])
def test_a_chats_tokens_are_its_texts(size: int) -> None:
    made = scan(CHAT, size, chat=True)
    assert len(made.token_times) == 2
    assert made.end().is_whole


@pytest.mark.parametrize("size", [7, 10_000])
def test_an_end_is_no_token_though_its_reason_comes_before_its_text(size: int) -> None:
    made = scan(
        b'data: {"choices":[{"index":0,"finish_reason":null,"text":"a"}]}\n\n'
        b'data: {"choices":[{"index":0,"finish_reason":null,"text":""}]}\n\n'
        b'data: {"choices":[{"index":0,"finish_reason":"length","text":""}]}\n\n',
        size,
    )
    assert len(made.token_times) == 2


@pytest.mark.parametrize("count", [0, -3])
def test_a_usage_that_cannot_be_is_none(count: int) -> None:
    usage = b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\ndata: [DONE]\n\n' % count
    ending = scan(b'data: {"choices":[{"text":"a"}]}\n\n' + usage, 10_000).end()
    assert ending.is_whole
    assert ending.output_tokens is None


def test_signs_of_life_do_not_hide_the_usage() -> None:
    usage = b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\n'
    made = StreamScan(chat=False)
    for line in [usage, *[b": ping\n\n"] * 9, b"data: [DONE]\n\n"]:
        made.push(line, 0.0)
    assert made.end().output_tokens == 3


def test_usage_is_read_from_the_end() -> None:
    ending = scan(COMPLETION, 10_000).end()
    assert (ending.input_tokens, ending.output_tokens, ending.cached_tokens) == (7, 3, 2)


def test_a_token_has_the_time_of_the_read_that_completed_it() -> None:
    made = StreamScan(chat=False)
    made.push(b'data: {"choices":[{"text":"a', 1.0)
    made.push(b'"}]}\n\ndata: {"choices":[{"text":"b"}]}\n\n', 2.0)
    assert list(made.token_times) == [2.0, 2.0]


def test_lines_may_end_as_in_http() -> None:
    made = scan(COMPLETION.replace(b"\n", b"\r\n"), 50)
    assert len(made.token_times) == 3
    assert made.end().is_whole


@pytest.mark.parametrize("size", [1, 50, 10_000])
def test_lines_may_end_with_a_carriage_return_alone(size: int) -> None:
    made = scan(COMPLETION.replace(b"\n", b"\r"), size)
    assert len(made.token_times) == 3
    assert made.end().output_tokens == 3


@pytest.mark.parametrize(("stream", "num_tokens"), [(COMPLETION, 3), (CHAT, 2)])
def test_a_colon_may_have_a_space_before_it(stream: bytes, num_tokens: int) -> None:
    made = scan(stream.replace(b'":', b'" :'), 10_000, chat=stream is CHAT)
    assert len(made.token_times) == num_tokens
    assert made.end().is_whole


def test_an_event_may_have_several_lines_of_data() -> None:
    made = scan(COMPLETION.replace(b"{", b"{\ndata: "), 10_000)
    assert len(made.token_times) == 3
    ending = made.end()
    assert (ending.input_tokens, ending.output_tokens, ending.cached_tokens) == (7, 3, 2)


def test_events_need_no_empty_line_between_them() -> None:
    made = scan(COMPLETION.replace(b"\n\n", b"\n"), 10_000)
    assert len(made.token_times) == 3
    ending = made.end()
    assert ending.is_whole
    assert ending.output_tokens == 3


def test_a_reason_to_finish_is_an_end_without_done() -> None:
    assert scan(COMPLETION.removesuffix(b"data: [DONE]\n\n"), 10_000).end().is_whole


def test_a_stream_without_an_end_is_not_whole() -> None:
    assert not scan(COMPLETION[:200], 10_000).end().is_whole


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"error":{"message":"it broke"}}\n\n',
        b'error: {"error":"it broke"}\n\n',
        b'event: error\ndata: {"message":"it broke"}\n\n',
        b'event: error\ndata: {"error":{"message":"it broke"}}\n\n',
        b"event: error\ndata: it broke\n\n",
    ],
)
def test_an_error_event_spoils_the_stream(event: bytes) -> None:
    ending = scan(COMPLETION + event, 10_000).end()
    assert not ending.is_whole
    assert ending.error == "it broke"


@pytest.mark.parametrize(
    "noise",
    [
        b": ping\n\n",
        b"data: {not json}\n\n",
        b"data: 3\n\n",
        b'data: {"choices":3}\n\n',
        b'data: {"error":"\xff"}\n\n',
        b"data: " + b"[" * 100_000 + b"\n\n",
    ],
)
def test_noise_is_passed_over(noise: bytes) -> None:
    made = scan(noise + COMPLETION + noise, 10_000)
    assert len(made.token_times) == 3
    assert made.end().is_whole


def test_a_line_without_end_is_given_up() -> None:
    made = StreamScan(chat=False)
    assert made.push(b"x" * MAX_LINE_BYTES, 0.0)
    assert not made.push(b"x", 0.0)
