"""Writes a document as TOML: the standard library only reads it.

Texts, numbers, truths, lists and tables of them. Knows nothing of what they mean.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def toml_text(document: Mapping[str, Any]) -> str:
    """Return the document; entries that are None are left out. What `tomllib` reads from it is equal."""
    lines = [f"{_key(name)} = {_value(value)}" for name, value in document.items() if value is not None]
    return "".join(f"{line}\n" for line in lines)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, str):
        # A JSON text is a TOML text, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        entries = (f"{_key(name)} = {_value(entry)}" for name, entry in value.items() if entry is not None)
        return "{" + ", ".join(entries) + "}"
    return "[" + ", ".join(_value(entry) for entry in value) + "]"


def _number(value: float) -> str:
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return "nan" if math.isnan(value) else repr(value)


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _value(name)
