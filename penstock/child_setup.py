"""The document that a parent process gives a child on its standard input: one msgspec struct as JSON.

Knows nothing of what is in it, but that paths travel as text.
"""

from pathlib import Path
from typing import Any, TypeVar

import msgspec

Setup = TypeVar("Setup", bound=msgspec.Struct)


def encode_setup(setup: msgspec.Struct) -> bytes:
    return msgspec.json.encode(setup, enc_hook=str)


def decode_setup(document: bytes, kind: type[Setup]) -> Setup:
    return msgspec.json.decode(document, type=kind, dec_hook=_to_path)


def _to_path(kind: type, value: Any) -> Path:
    assert kind is Path
    return Path(value)
