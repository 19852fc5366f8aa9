"""Block events on the wire."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.block_events import (
    BlockChanges,
    BlockSnapshot,
    BrokenMessages,
    KeepAlive,
    MessageReader,
    encode,
    pack,
    unpack,
)

MESSAGES = [BlockSnapshot(7, 16, pack([1, 2])), BlockChanges(8, stored=pack([3])), KeepAlive(), BlockChanges(9)]


@given(st.integers(1, 40))
def test_messages_are_the_same_however_their_bytes_arrive(size):
    data = b"".join(map(encode, MESSAGES))
    reader = MessageReader()
    came = [message for at in range(0, len(data), size) for message in reader.feed(data[at : at + size])]
    assert came == MESSAGES


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_names_survive_packing(names):
    assert list(unpack(pack(names))) == names


DEEP = b"\x81\xa1x" + b"\x91" * 20000 + b"\xc0"


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        b"\x01\x00\x00\x00x",
        b"\x02\x00\x00\x00\x80\x80",
        len(DEEP).to_bytes(4, "little") + DEEP,
    ],
)
def test_what_is_no_message_is_refused(data):
    with pytest.raises(BrokenMessages):
        list(MessageReader().feed(data))
