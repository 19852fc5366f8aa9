"""The file in which the operator declares beginnings of prompts as public. Knows nothing of tokens."""

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import ConfigError

_MAX_FILE_BYTES = 4 * 1024 * 1024
_MAX_PREFIXES = 256
_EXAMPLE = '[[prefixes]] with text = "…", or with system = "…" for a system message'


class DeclaredPrefix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One declared beginning: of a text as /v1/completions takes it, or a chat's system message."""

    text: str | None = None
    system: str | None = None


def load_prefixes(path: str) -> tuple[DeclaredPrefix, ...]:
    """Read a file of declared prefixes. Raises ConfigError that says which entry is wrong and why."""
    option = "--shared-prefixes"
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        document = tomllib.loads(data[:_MAX_FILE_BYTES].decode("utf-8"))
    except OSError as error:
        raise ConfigError(option, path, f"it cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(option, path, f"it is not valid TOML: {error}") from error
    entries = document.get("prefixes")
    if len(data) > _MAX_FILE_BYTES or not isinstance(entries, list) or set(document) != {"prefixes"}:
        raise ConfigError(option, path, f"give entries, at most {_MAX_FILE_BYTES} bytes in all: {_EXAMPLE}")
    if not 1 <= len(entries) <= _MAX_PREFIXES:
        raise ConfigError(option, path, f"give 1 to {_MAX_PREFIXES} entries: {_EXAMPLE}")
    return tuple(_read_entry(option, path, number, entry) for number, entry in enumerate(entries, start=1))


def _read_entry(option: str, path: str, number: int, entry: Any) -> DeclaredPrefix:
    try:
        prefix = msgspec.convert(entry, DeclaredPrefix)
    except msgspec.ValidationError as error:
        raise ConfigError(option, path, f"entry {number}: {error}; give {_EXAMPLE}") from None
    if bool(prefix.text) == bool(prefix.system):
        raise ConfigError(option, path, f"entry {number} needs either text or system: {_EXAMPLE}")
    return prefix
