"""How likely the tokens of a prompt are, each given those before it, and what would have been likelier.

That needs logits of every position, where a prompt otherwise needs those of its last: only requests that ask for it pay
for them. Knows tensors; nothing of rows or requests.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.messages import PromptLogprobs
from penstock.engine.runner.transfer import to_host
from penstock.kernels import sampling

# Positions whose logits are there at the same time, to bound memory.
_LOGIT_ROWS = 128


@dataclass(frozen=True, slots=True)
class PendingScores:
    """Log-probabilities on their way to the host."""

    own: Tensor  # float32 [tokens]
    top_ids: Tensor  # int32 [tokens, top]
    top_logprobs: Tensor  # float32 [tokens, top]

    def read(self) -> PromptLogprobs:
        """Pack what has arrived."""
        own, ids, best = (part.numpy().tobytes() for part in (self.own, self.top_ids, self.top_logprobs))
        return PromptLogprobs(own, self.top_ids.shape[1], ids, best)


def score_prompt(logits_of: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, num_top: int) -> PendingScores:
    """Score the token behind each position. hidden: [tokens, hidden]; targets: [tokens] int64."""
    own, ids, best = [], [], []
    for states, wanted in zip(hidden.split(_LOGIT_ROWS), targets.split(_LOGIT_ROWS), strict=True):
        chosen, top_values, top_ids = sampling.log_probabilities(logits_of(states), wanted, num_top)
        own.append(chosen)
        best.append(top_values)
        ids.append(top_ids.int())
    return PendingScores(to_host(torch.cat(own)), to_host(torch.cat(ids)), to_host(torch.cat(best)))
