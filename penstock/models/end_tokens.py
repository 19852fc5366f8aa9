"""Which tokens end a text or a turn, for files that name only one of them, and how files name tokens. No torch."""

from collections.abc import Mapping

# GGUF files name one end-of-text token; a chat model ends its turn with any of these that it has.
_END_TOKENS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
    }
)

END_TOKEN_NAMES = ("eos_token_id", "eot_token_id", "eom_token_id")  # of text, turn and message, in GGUF metadata

# No token, as files write it that count without a sign.
_NONE = 2**32 - 1


def gguf_token_id(metadata: Mapping[str, object], name: str) -> object:
    """Return the id that the metadata gives for a role, such as `bos_token_id`; None where no token has it."""
    token_id = metadata.get(f"tokenizer.ggml.{name}")
    return None if token_id == _NONE else token_id


def gguf_end_token_ids(metadata: Mapping[str, object]) -> tuple[int, ...]:
    """Return the ids that the metadata names, then those known by their text."""
    named = [gguf_token_id(metadata, name) for name in END_TOKEN_NAMES]
    ids = [token_id for token_id in named if isinstance(token_id, int) and token_id >= 0]
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        ids += [token_id for token_id, token in enumerate(tokens) if token in _END_TOKENS]
    return tuple(dict.fromkeys(ids))
