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


def gguf_end_token_ids(metadata: Mapping[str, object]) -> tuple[int, ...]:
    """Return the ids that the metadata names (end of text, turn and message), then those known by their text."""
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = [token_id for token_id in named if isinstance(token_id, int) and token_id >= 0]
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        ids += [token_id for token_id, token in enumerate(tokens) if token in _END_TOKENS]
    return tuple(dict.fromkeys(ids))
