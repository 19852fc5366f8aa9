"""What a replica tells a gateway of a prompt it has taken: how long it is, how much was cached, where its blocks end.

A gateway asks with the header `x-penstock-prompt: 1`, and the answer has the note under the same name:

    TOKENS CACHED EVERY NAMES

NAMES are the short names of every EVERY-th block of the prompt, in base64: by them and by the block events
(`protocol.block_events`) a gateway that knows neither tokenizer nor hash key can tell how much of a text that it has
sent before is still cached. Knows nothing of HTTP.
"""

import base64
import binascii
from collections.abc import Sequence

import msgspec

from penstock.block_hash import SHORT_NAME_BYTES, BlockHash, short_name

PROMPT_HEADER = "x-penstock-prompt"
_MAX_NAMES = 256  # of one prompt: 4 KiB of header


class PromptNote(msgspec.Struct, frozen=True, array_like=True):
    """One prompt as its replica sees it. `names[i]` is the block that ends `(i + 1) * every_tokens` tokens in."""

    num_tokens: int
    num_cached_tokens: int
    every_tokens: int = 0
    names: list[int] = []

    def name_at(self, num_tokens: float) -> int | None:
        """Return the name of the last block that is told of within the first `num_tokens` tokens."""
        index = int(num_tokens // self.every_tokens) if self.every_tokens else 0
        return self.names[min(index, len(self.names)) - 1] if index and self.names else None


def make_note(num_tokens: int, num_cached_tokens: int, names: Sequence[BlockHash], block_tokens: int) -> PromptNote:
    """Return the note of a prompt whose full blocks have these names; a long one's are told of more sparsely."""
    stride = max(1, -(-len(names) // _MAX_NAMES))
    told = [short_name(name) for name in names[stride - 1 :: stride]]
    return PromptNote(num_tokens, num_cached_tokens, stride * block_tokens, told)


def encode_note(note: PromptNote) -> str:
    packed = b"".join(name.to_bytes(SHORT_NAME_BYTES, "little") for name in note.names)
    return f"{note.num_tokens} {note.num_cached_tokens} {note.every_tokens} {base64.b64encode(packed).decode()}"


def decode_note(text: str) -> PromptNote | None:
    """Return what a header says; None where it is not one of these."""
    if not text:
        return None
    try:
        num_tokens, num_cached_tokens, every_tokens, *rest = text.split(" ")
        packed = base64.b64decode(rest[0], validate=True) if rest else b""
        names = [
            int.from_bytes(packed[at : at + SHORT_NAME_BYTES], "little")
            for at in range(0, len(packed), SHORT_NAME_BYTES)
        ]
        return PromptNote(int(num_tokens), int(num_cached_tokens), int(every_tokens), names)
    except (ValueError, binascii.Error):
        return None
