"""Which tokens end a text or a turn, for files that name only one of them. No torch."""

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


def gguf_end_token_ids(metadata: Mapping[str, object]) -> tuple[int, ...]:
    """Return the ids that the metadata names, then those known by their text."""
    named = [metadata.get(f"tokenizer.ggml.{name}") for name in END_TOKEN_NAMES]
    ids = [token_id for token_id in named if isinstance(token_id, int) and 0 <= token_id != _NONE]
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        ids += [token_id for token_id, token in enumerate(tokens) if token in _END_TOKENS]
    return tuple(dict.fromkeys(ids))
