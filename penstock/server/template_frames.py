"""The frames between an API worker and its template process: a length, then that many bytes of JSON.

Alone in a module so that neither side imports what only the other needs.
"""

import json
import struct
from typing import Any

MAX_FRAME_BYTES = 96 * 1024**2
HEAD_BYTES = 4

_LENGTH = struct.Struct(">I")


def encode_frame(document: dict[str, Any]) -> bytes:
    data = json.dumps(document, ensure_ascii=False).encode()
    return _LENGTH.pack(len(data)) + data


def length_in(head: bytes) -> int:
    """Return how many bytes follow a frame's head."""
    length: int = _LENGTH.unpack(head)[0]
    return length


def decode_document(data: bytes) -> dict[str, Any]:
    document = json.loads(data)
    if not isinstance(document, dict):
        raise ValueError("a frame holds an object")
    return document
