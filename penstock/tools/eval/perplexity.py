"""Perplexity of running text: how surprised a model is by each next token.

Knows token ids and log-probabilities only: whoever can score tokens (an engine, a server, a decoder) hands in a
function. Compare figures of one text and one window only.
"""

import math
from collections.abc import Callable, Sequence

# Takes sequences of token ids; returns, for each, the natural log-probability of every token but the first.
Score = Callable[[Sequence[Sequence[int]]], list[list[float]]]


def perplexity(
    token_ids: Sequence[int], score: Score, *, window_tokens: int = 512, max_windows: int | None = None
) -> float:
    """Score the text in windows that know nothing of one another; a shorter rest is left out."""
    if window_tokens < 2:
        raise ValueError("a window needs at least two tokens")
    num_windows = len(token_ids) // window_tokens
    if max_windows is not None:
        num_windows = min(num_windows, max_windows)
    if num_windows == 0:
        raise ValueError(f"the text has {len(token_ids)} tokens, less than one window of {window_tokens}")
    starts = range(0, num_windows * window_tokens, window_tokens)
    scored = score([token_ids[start : start + window_tokens] for start in starts])
    logprobs = [logprob for window in scored for logprob in window]
    return math.exp(-math.fsum(logprobs) / len(logprobs))
