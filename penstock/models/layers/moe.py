"""The sparse feed-forward layer: a router picks a few experts for each token.

Two ways to the same result: where the host can look at the picks for free (CPU) each expert runs on its own tokens;
elsewhere every expert runs on all tokens, with weight zero where it was not picked, so that shapes never depend on data
and the step can be captured in a graph. Knows nothing of how experts are kept.
"""

import torch
from torch import Tensor

from penstock.models.layers.feed_forward import FeedForward
from penstock.models.layers.linear import Linear
from penstock.models.spec import MoeSpec
from penstock.parallel.collectives import all_reduce
from penstock.parallel.groups import Group


class Moe:
    """The experts themselves do not reduce over the group; their sum does, once."""

    def __init__(self, router: Linear, experts: list[FeedForward], spec: MoeSpec, group: Group) -> None:
        self.router = router
        self.experts = experts
        self.spec = spec
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        weights, picks = route(self.router.apply(x), self.spec)
        run = self.run_picked if x.device.type == "cpu" else self.run_all
        return all_reduce(run(x, weights, picks), self.group)

    def run_picked(self, x: Tensor, weights: Tensor, picks: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for expert in torch.unique(picks).tolist():
            tokens, ranks = (picks == expert).nonzero(as_tuple=True)
            part = self.experts[expert].forward(x[tokens])
            total.index_add_(0, tokens, part.mul_(weights[tokens, ranks, None]))
        return total

    def run_all(self, x: Tensor, weights: Tensor, picks: Tensor) -> Tensor:
        shares = x.new_zeros(len(x), len(self.experts)).scatter_(1, picks, weights)  # [tokens, experts]
        total = torch.zeros_like(x)
        for expert, feed_forward in enumerate(self.experts):
            total.addcmul_(feed_forward.forward(x), shares[:, expert, None])
        return total


def route(logits: Tensor, spec: MoeSpec) -> tuple[Tensor, Tensor]:
    """Return the weights and numbers of each token's experts, both [tokens, num_active]. logits: [tokens, experts]."""
    weights, picks = logits.float().softmax(dim=-1).topk(spec.num_active, dim=-1)
    if spec.normalise_weights:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), picks
