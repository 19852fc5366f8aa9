"""A model that is a hash: every token depends on all before it and, where sampling, on the seed.

So answers are the same whatever else is in the batch, however the prompt was chunked and wherever a request resumed, as
a real model's are. Knows nothing of steps, rows or time.
"""

from collections.abc import Sequence

import numpy as np

from penstock.engine.messages import PromptLogprobs, TokenLogprob
from penstock.request import SamplingParams

_MASK = 2**64 - 1
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that no token is lost from a history
_CHOSEN_LOGPROB = -0.5


class SimulatedLanguage:
    """Histories as 64-bit numbers, and what follows them."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], mean_answer_tokens: float | None = None) -> None:
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._end = eos_token_ids[0] if eos_token_ids else None
        self._end_share = 0 if mean_answer_tokens is None else int(2**32 / max(1.0, mean_answer_tokens))
        self._powers = np.ones(1, np.uint64)  # of the multiplier, as many as the longest history so far

    def history(self, tokens: Sequence[int]) -> int:
        """Return the history of these tokens: the same as pushing them one by one."""
        count = len(tokens)
        if count > len(self._powers):
            steps = np.full(2 * count, _MULTIPLIER, np.uint64)
            steps[0] = 1
            self._powers = np.multiply.accumulate(steps)
        values = np.asarray(tokens, np.uint64) + np.uint64(1)
        return int(np.dot(values, self._powers[:count][::-1]))

    def push(self, history: int, token: int) -> int:
        return (history * _MULTIPLIER + token + 1) & _MASK

    def draw(self, history: int, params: SamplingParams, seed: int) -> int:
        """Return the token that follows. Greedy requests do not depend on the seed."""
        mixed = _mix(history if params.greedy else history ^ _mix(seed & _MASK))
        if self._end is not None and not params.ignore_eos and mixed >> 32 < self._end_share:
            return self._end
        token = mixed % self._vocab_size
        # Answers end by the share above alone, so no other draw may be an end token.
        while token in self._eos:
            token = (token + 1) % self._vocab_size
        return token

    def logprob(self, token: int, num_top: int) -> TokenLogprob:
        """Made-up but well-formed: the chosen token is the likeliest, its neighbours follow."""
        top_ids = [(token + index) % self._vocab_size for index in range(num_top)]
        return TokenLogprob(token, _CHOSEN_LOGPROB, top_ids, [_CHOSEN_LOGPROB - index for index in range(num_top)])

    def prompt_logprobs(self, num_tokens: int, num_top: int) -> PromptLogprobs:
        """Made up likewise, the same for each of so many tokens."""
        one = self.logprob(0, num_top)
        own, ids, best = (
            np.tile(np.array(values, kind), num_tokens).tobytes()
            for values, kind in (([one.logprob], np.float32), (one.top_ids, np.int32), (one.top_logprobs, np.float32))
        )
        return PromptLogprobs(own, num_top, ids, best)


def _mix(value: int) -> int:
    """Spread a number's bits (the finaliser of SplitMix64)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
