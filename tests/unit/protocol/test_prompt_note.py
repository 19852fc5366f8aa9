"""What a replica tells of a prompt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.block_hash import short_name
from penstock.protocol.prompt_note import PromptNote, decode_note, encode_note, make_note


def names_of(count: int) -> list[bytes]:
    return [index.to_bytes(16, "little") for index in range(1, count + 1)]


@given(st.integers(0, 2000))
def test_a_note_survives_its_header(count):
    note = make_note(16 * count + 3, 16, names_of(count), 16)
    header = encode_note(note)
    assert decode_note(header) == note
    assert len(header) < 4096


def test_a_place_is_told_by_the_last_block_within_it():
    note = make_note(64, 0, names_of(4), 16)
    assert [note.name_at(tokens) for tokens in (0, 15, 16, 40, 64, 999)] == [
        None, None, *[short_name(names_of(4)[index]) for index in (0, 1, 3, 3)],
    ]  # fmt: skip


def test_a_long_prompt_is_told_of_more_sparsely():
    note = make_note(16 * 1000, 0, names_of(1000), 16)
    assert note.every_tokens == 64
    assert note.name_at(64) == short_name(names_of(1000)[3])


@pytest.mark.parametrize("text", ["", "1", "a b c", "1 2 3 ?", "1 2"])
def test_what_is_no_note_is_none(text):
    assert decode_note(text) is None


def test_a_note_without_names_tells_lengths_alone():
    assert decode_note(encode_note(PromptNote(100, 48))) == PromptNote(100, 48)
