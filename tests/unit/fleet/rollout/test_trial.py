"""One answer measured, and two compared."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.fleet.rollout.shadow import ShadowCopy
from penstock.fleet.rollout.trial import Trial, compare_outputs
from penstock.protocol.frames import ChoiceTokens, FrameReader, frame, last_frame

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def told(tokens):
    trial = Trial("a")
    trial.end([tokens], first_at=trial.began_at)
    return trial


def streamed(*texts, shape="text"):
    trial = Trial("a")
    for text in texts:
        choice = {"index": 0, "text": text} if shape == "text" else {"index": 0, "delta": {"content": text}}
        trial.feed(b"data: %b\n\n" % json.dumps({"choices": [choice]}).encode())
    trial.feed(b"data: [DONE]\n\n")
    trial.end()
    return trial


def whole(text, num_tokens=8):
    trial = Trial("a")
    message = {"choices": [{"index": 0, "message": {"content": text}}], "usage": {"completion_tokens": num_tokens}}
    trial.take_whole(json.dumps(message).encode())
    return trial


@given(TOKENS)
def test_equal_answers_have_no_divergence(tokens):
    assert compare_outputs(told(tokens), told(list(tokens))) == (len(tokens), False)


@given(TOKENS, st.integers(0, 39), TOKENS)
def test_tokens_are_compared_up_to_the_first_that_differs(tokens, place, rest):
    place %= len(tokens)
    other = [*tokens[:place], tokens[place] + 1, *rest]
    assert compare_outputs(told(tokens), told(other)) == (place + 1, True)


def test_tokens_that_the_last_frame_did_not_tell_are_no_divergence_but_many_are():
    assert compare_outputs(told([1, 2, 3, 4]), told([1, 2])) == (2, False)
    assert compare_outputs(told([1] * 40), told([1] * 2)) == (3, True)


@pytest.mark.parametrize(("text", "differs"), [("a busy server was late with all of this", False), ("short", True)])
def test_tokens_that_a_late_server_sent_with_the_end_are_no_divergence(text, differs):
    reader, event = FrameReader(), json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": "length"}]})
    reader.feed(frame(b"data: {}\n\n", ChoiceTokens(0, [1, 1])) + last_frame(b"data: %b\n\n" % event.encode()))
    late = Trial("b")
    late.end(reader.token_ids, late.began_at, reader.last_events)
    assert compare_outputs(told([1] * 40), late) == compare_outputs(late, told([1] * 40)) == (2 + differs, differs)


@pytest.mark.parametrize("shape", ["text", "delta"])
def test_texts_count_four_characters_as_a_token(shape):
    assert compare_outputs(streamed("abcd", "efgh", shape=shape), streamed("abcdefgh", shape=shape)) == (2, False)
    assert compare_outputs(streamed("abcdefgh"), streamed("abcdxfgh")) == (2, True)
    assert compare_outputs(whole("abcdefgh"), whole("abcdefgh")) == (2, False)
    assert compare_outputs(whole("yes"), whole("yes, and more")) == (1, True)


@pytest.mark.parametrize("begin", [b"data: ", b"data:", b": ping\n\nevent: message\ndata: "])
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_events_are_read_however_a_server_writes_them(begin, end):
    trial = Trial("a")
    for text in ("ab", "cd", "ef", "gh"):
        event = json.dumps({"choices": [{"index": 0, "text": text}]}).encode()
        trial.feed(begin + event + end)
    trial.feed(begin + b"[DONE]" + end)
    trial.end()
    assert (trial.text(), trial.num_events) == ("abcdefgh", 4)
    assert compare_outputs(streamed("abcdefgh"), trial) == (2, False)


def test_answers_of_different_kinds_or_without_a_word_are_not_compared():
    assert compare_outputs(told([1, 2]), streamed("ab")) is None
    assert compare_outputs(whole(""), whole("")) is None


def test_times_of_a_stream_and_of_a_whole_answer():
    trial = told([1, 2, 3, 4, 5])
    trial.began_at, trial.first_at, trial.ended_at = 10.0, 11.0, 13.0
    assert (trial.ttft_seconds, trial.time_per_token_seconds()) == (1.0, 0.5)
    answer = whole("hello there", num_tokens=8)
    answer.began_at, answer.ended_at = 10.0, 14.0
    assert (answer.ttft_seconds, answer.time_per_token_seconds()) == (None, 0.5)


def test_short_hindered_and_failed_answers_have_no_time_per_token():
    hindered, failed = told([1] * 9), told([1] * 9)
    hindered.was_hindered = True
    failed.fail()
    assert [item.time_per_token_seconds() for item in (told([1, 2]), hindered, failed)] == [None] * 3
    assert failed.ttft_seconds is None and failed.is_measured


def test_an_endless_answer_is_not_kept_whole():
    trial = Trial("a")
    for _ in range(100):
        trial.feed(b"data: {" + b"x" * 100_000)
    assert len(trial.data) < 500_000
    assert trial.num_events == 100


def test_what_is_not_to_be_compared_is_not_kept():
    trial = Trial("a", keeps_text=False)
    for _ in range(5):
        trial.feed(b'data: {"choices": []}\n\n')
    assert (len(trial.data), trial.num_events) == (0, 5)


def test_several_choices_are_not_compared():
    trials = [Trial("a"), Trial("b")]
    for trial in trials:
        trial.end([[1, 2], [3]], first_at=trial.began_at)
    assert compare_outputs(*trials) is None


@pytest.mark.parametrize(("temperature", "is_repeatable"), [("0", True), ("0.0", True), ("1", False), ('"0"', False)])
def test_only_greedy_answers_that_are_told_as_text_are_compared_whatever_a_temperature_is(temperature, is_repeatable):
    copy = ShadowCopy("/v1/completions", b'{"temperature": %b}' % temperature.encode(), False, 0, 1.0)
    assert copy.is_repeatable(Trial("a"), Trial("b")) is is_repeatable
