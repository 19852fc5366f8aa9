"""JSON that is made a part at a time: long answers are never encoded, held twice or copied at once.

A struct with holes gives the shape, and `Grown` text or lists fill them. Knows nothing of what any of it means.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

# In place of a text or a list. No JSON has the byte in it, so it is found again.
_MARK = b"\0"
TEXT_HOLE: Any = msgspec.Raw(b'"' + _MARK + b'"')
LIST_HOLE: Any = msgspec.Raw(b"[" + _MARK + b"]")

_encoder = msgspec.json.Encoder()


class Grown:
    """The inside of a text, or of a list, encoded as it came."""

    def __init__(self) -> None:
        self.data = bytearray()

    def add_text(self, text: str) -> None:
        self.data += _encoder.encode(text)[1:-1]

    def add_items(self, items: Sequence[Any]) -> None:
        if items:
            if self.data:
                self.data += b","
            self.data += _encoder.encode(items)[1:-1]


Part = bytes | bytearray


def filled(shape: msgspec.Struct, *fillings: Sequence[Part]) -> list[Part]:
    """Return the parts of a struct's JSON with each of its holes filled."""
    first, *others = _encoder.encode(shape).split(_MARK)
    parts: list[Part] = [first]
    for filling, behind in zip(fillings, others, strict=True):
        parts += [part for part in filling if part]
        parts.append(behind)
    return parts


def joined(*items: Sequence[Part]) -> list[Part]:
    """Return items, each in parts, as the inside of a list; one without parts is none."""
    parts: list[Part] = []
    for item in items:
        if any(item):
            parts += [b",", *item] if parts else item
    return parts


class Body:
    """A text in parts, which is read once: a part that has been is let go of."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.num_bytes = sum(map(len, parts))
        self._parts = deque(parts)

    def chunks(self, max_bytes: int) -> Iterator[bytes]:
        """Yield all of it, so many bytes at a time."""
        chunk = bytearray()
        while self._parts:
            part = self._parts.popleft()
            for start in range(0, len(part), max_bytes):
                chunk += part[start : start + max_bytes]
                if len(chunk) >= max_bytes:
                    yield bytes(chunk)
                    chunk.clear()
        if chunk:
            yield bytes(chunk)

    def whole(self) -> bytes:
        return b"".join(self._parts)
