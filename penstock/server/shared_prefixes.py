"""Beginnings of prompts that the operator declared public: their cached blocks are shared by all tenants.

A prompt is public as far as it follows a declared beginning, token by token; all behind that is its tenant's own.
Knows nothing of blocks or hashes: the engine shares what is counted here, in whole blocks.
"""

from collections.abc import Sequence

from penstock.engine.tokenizer import Tokenizer
from penstock.errors import TemplateFailed
from penstock.server.chat_template import ChatTemplate
from penstock.server.prefix_file import DeclaredPrefix


class SharedPrefixes:
    """Declared beginnings as token ids."""

    def __init__(self, declared: Sequence[list[int]]) -> None:
        self._declared = [token_ids for token_ids in declared if token_ids]

    def count_tokens(self, prompt: list[int]) -> int:
        """Return how many leading tokens of a prompt are public."""
        return max((_common_tokens(prompt, token_ids) for token_ids in self._declared), default=0)


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
