"""Frames come apart as they were put together, however the network cut them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.frames import BrokenFrames, ChoiceTokens, FrameReader, failure_frame, frame, last_frame

EVENTS = st.binary(max_size=60).map(lambda text: b"data: " + text + b"\n\n")
CHOICES = st.builds(
    ChoiceTokens, st.integers(0, 300), st.lists(st.integers(0, 200_000), max_size=4), has_ended=st.booleans()
)
FRAMES = st.lists(st.tuples(EVENTS, st.lists(CHOICES, min_size=1, max_size=3)), max_size=8)


def told(frames):
    """Return the tokens of each choice and those that have ended, as frames tell them."""
    tokens: dict[int, list[int]] = {}
    ended = []
    for _, choices in frames:
        for choice in choices:
            tokens.setdefault(choice.number, []).extend(choice.token_ids)
            ended += [choice.number] if choice.has_ended else []
    last = max([number for number, ids in tokens.items() if ids] + ended, default=-1)
    return [tokens.get(number, []) for number in range(last + 1)], ended


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces, place = [], 0
    for size in sizes:
        pieces.append(data[place : place + size])
        place += size
    return [*pieces, data[place:]]


@given(FRAMES, st.lists(st.integers(1, 40), max_size=40))
def test_events_and_tokens_survive_any_cut(frames, sizes):
    data = b"".join(frame(events, *choices) for events, choices in frames) + last_frame(b"data: [DONE]\n\n")
    reader = FrameReader()
    received = b"".join(reader.feed(piece) for piece in cut(data, sizes) if piece)
    assert received == b"".join(events for events, _ in frames) + b"data: [DONE]\n\n"
    assert (reader.token_ids, reader.ended_choices) == told(frames)
    assert reader.finished


@given(FRAMES, st.integers(0, 400))
def test_what_was_cut_off_is_neither_shown_nor_told(frames, length):
    data = b"".join(frame(events, *choices) for events, choices in frames)[:length]
    reader = FrameReader()
    received = reader.feed(data) if data else b""
    whole, size = 0, 0
    for events, choices in frames:
        size += len(frame(events, *choices))
        if size > len(data):
            break
        whole += 1
    assert received == b"".join(events for events, _ in frames[:whole])
    assert (reader.token_ids, reader.ended_choices) == told(frames[:whole])
    assert not reader.finished


def test_another_server_goes_on_behind_the_last_whole_frame():
    reader = FrameReader()
    assert reader.feed(frame(b"one", ChoiceTokens(0, [1, 2])) + frame(b"two", ChoiceTokens(0, [3]))[:-2]) == b"one"
    reader.start_over()
    assert reader.feed(frame(b"two", ChoiceTokens(0, [3])) + last_frame(b"end")) == b"twoend"
    assert reader.token_ids == [[1, 2, 3]]


def test_a_servers_failure_is_told_and_not_shown():
    reader = FrameReader()
    assert reader.feed(frame(b"one", ChoiceTokens(0, [1])) + failure_frame(b"sorry", "engine_failed")) == b"one"
    assert (reader.failure, reader.failure_events) == ("engine_failed", b"sorry")


@pytest.mark.parametrize(
    "data",
    [
        b"data: {}\n\n",
        b": x 1\n",
        b": 12\n",
        b": 99999999 1\nx",
        b": 3 1;x\nabc",
        b": 3 1:2:3\nabc",
        b": 3 99999:1\nabc",
        b":" * 100_000,
    ],
)
def test_what_is_no_frame_is_refused(data):
    with pytest.raises(BrokenFrames):
        FrameReader().feed(data)
