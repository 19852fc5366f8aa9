"""Beginnings of prompts that the operator declared public: their cached blocks are shared by all tenants.

A prompt is public as far as it follows a declared beginning, token by token; all behind that is its tenant's own.
Knows nothing of blocks or hashes: the engine shares what is counted here, in whole blocks.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.engine.tokenizer import Tokenizer
from penstock.errors import ConfigError, TemplateFailed
from penstock.server.chat_template import ChatTemplate

_MAX_FILE_BYTES = 4 * 1024 * 1024
_MAX_PREFIXES = 256
_EXAMPLE = '[[prefixes]] with text = "…", or with system = "…" for a system message'


class DeclaredPrefix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One declared beginning: of a text as /v1/completions takes it, or a chat's system message."""

    text: str | None = None
    system: str | None = None


class SharedPrefixes:
    """Declared beginnings as token ids."""

    def __init__(self, declared: Sequence[list[int]]) -> None:
        self._declared = [token_ids for token_ids in declared if token_ids]

    def count_tokens(self, prompt: list[int]) -> int:
        """Return how many leading tokens of a prompt are public."""
        return max((_common_tokens(prompt, token_ids) for token_ids in self._declared), default=0)


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


async def tokenize_prefixes(
    declared: Sequence[DeclaredPrefix], tokenizer: Tokenizer, template: ChatTemplate | None
) -> SharedPrefixes:
    """Return the declared prefixes as this model's tokens. Raises TemplateFailed."""
    tokens = []
    for prefix in declared:
        if prefix.text is not None:
            tokens.append(tokenizer.encode(prefix.text, add_special=True))
        else:
            assert prefix.system is not None
            tokens.append(await _system_tokens(prefix.system, tokenizer, template))
    return SharedPrefixes(tokens)


async def _system_tokens(system: str, tokenizer: Tokenizer, template: ChatTemplate | None) -> list[int]:
    """Return how every chat with this system message begins: what two with other questions have in common."""
    if template is None:
        raise TemplateFailed("a shared prefix is a system message, but this model has no chat template")
    chats = []
    for question in ("0", "x"):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        chats.append(tokenizer.encode(await template.render(messages), add_special=False))
    first, second = chats
    return first[: _common_tokens(first, second)]


def _read_entry(option: str, path: str, number: int, entry: Any) -> DeclaredPrefix:
    try:
        prefix = msgspec.convert(entry, DeclaredPrefix)
    except msgspec.ValidationError as error:
        raise ConfigError(option, path, f"entry {number}: {error}; give {_EXAMPLE}") from None
    if bool(prefix.text) == bool(prefix.system):
        raise ConfigError(option, path, f"entry {number} needs either text or system: {_EXAMPLE}")
    return prefix


def _common_tokens(left: list[int], right: list[int]) -> int:
    """Return the length of the longest common beginning, comparing slices rather than tokens."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
