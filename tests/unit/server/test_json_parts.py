"""JSON in parts says what the same struct at once would say."""

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.json_parts import LIST_HOLE, TEXT_HOLE, Body, Grown, filled, joined


class Shape(msgspec.Struct):
    name: str
    text: str
    items: list[object]
    last: int = 7


TEXTS = st.lists(st.text(st.characters(codec="utf-8")))
ITEMS = st.lists(st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.text() | st.none()))


@given(st.text(), TEXTS, ITEMS, st.integers(1, 9))
def test_parts_add_up_to_the_whole(name, texts, items, size):
    text, grown = Grown(), Grown()
    for piece in texts:
        text.add_text(piece)
    for some in items:
        grown.add_items(some)
    parts = filled(Shape(name, TEXT_HOLE, LIST_HOLE), [text.data], [grown.data])
    expected = msgspec.to_builtins(Shape(name, "".join(texts), [item for some in items for item in some]))
    body = Body(parts)
    chunks = list(body.chunks(size))
    assert json.loads(b"".join(chunks)) == expected
    assert sum(map(len, chunks)) == body.num_bytes
    assert all(len(chunk) < 2 * size for chunk in chunks)
    assert json.loads(Body(parts).whole()) == expected


def test_items_without_anything_in_them_leave_no_comma():
    assert b"".join(joined([b""], [b"1"], [], [b"2", b"3"])) == b"1,23"
