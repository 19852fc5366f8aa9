"""The sparse feed-forward layer: a router picks a few experts for each token.

Three ways to the same result. Where the host can look at the picks for free (CPU) each expert runs on its own tokens.
On CUDA, experts kept as plain matrices are stacked, and kernels multiply each pick with its own expert's; for a handful
of tokens other kernels do all that a layer does between two states of the residual stream. What is left
runs every expert on all tokens, with weight zero where it was not picked, so that shapes never depend on data and the
step can be captured in a graph.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.models.layers.feed_forward import FeedForward
from penstock.models.layers.linear import Linear
from penstock.models.layers.norm import Norm
from penstock.models.quant.dense import DenseWeight
from penstock.models.spec import MoeSpec
from penstock.parallel.collectives import all_reduce
from penstock.parallel.groups import Group


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Plain matrices of all experts, one above the other, on CUDA."""

    gate_up: Tensor  # [experts, 2 * intermediate, hidden]
    down: Tensor  # [experts, hidden, intermediate]
    gelu: bool

    @classmethod
    def of(cls, experts: list[FeedForward]) -> "StackedExperts | None":
        """Copy the experts' matrices, or return None where they are not for the kernels."""
        gate_ups = [matrix for expert in experts if (matrix := _plain_matrix(expert.gate_up)) is not None]
        downs = [matrix for expert in experts if (matrix := _plain_matrix(expert.down)) is not None]
        if not len(gate_ups) == len(downs) == len(experts) or not downs[0].is_cuda or downs[0].dtype == torch.float32:
            return None
        from penstock.kernels.triton import experts as kernels

        if not kernels.fits(*downs[0].shape):
            return None
        return cls(torch.stack(gate_ups), torch.stack(downs), gelu=experts[0].gelu)

    def run(self, x: Tensor, logits: Tensor, spec: MoeSpec) -> Tensor:
        """x: [tokens, hidden]; logits: [tokens, experts] -> [tokens, hidden]."""
        from penstock.kernels.triton import experts as kernels

        weights, picks = kernels.route(logits, spec.num_active, normalise=spec.normalise_weights)
        groups = kernels.group_picks(picks, spec.num_experts)
        inner = kernels.gated_product(x, self.gate_up, groups, spec.num_active, gelu=self.gelu)
        return kernels.add_up(kernels.product(inner, self.down, weights, groups), spec.num_active)

    def advance(self, stream: Tensor, norm: Norm, router: Tensor, spec: MoeSpec) -> bool:
        """Add what the experts make of the normed stream to it, or change nothing and return False for many tokens.

        stream: [tokens, hidden]; router: [experts, hidden].
        """
        from penstock.kernels.triton import few_picks as kernels

        if len(stream) * spec.num_active > kernels.MAX_PICKS:
            return False
        routing = kernels.Routing(spec.num_experts, spec.num_active, spec.normalise_weights)
        x, logits = kernels.score_experts(stream, norm.weight, norm.eps, router)
        inner = kernels.gated_product(x, logits, self.gate_up, routing, gelu=self.gelu)
        kernels.add_product(inner, logits, self.down, routing, stream)
        return True


class Moe:
    """The experts themselves do not reduce over the group; their sum does, once."""

    def __init__(self, router: Linear, experts: list[FeedForward], spec: MoeSpec, group: Group) -> None:
        self.router = router
        self.spec = spec
        self.group = group
        self.stacked = StackedExperts.of(experts)
        self.experts = experts if self.stacked is None else []

    @property
    def linears(self) -> dict[str, Linear]:
        """The matrices that multiply every token, by place."""
        return {"router": self.router}

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        logits = self.router.apply(x)
        if self.stacked is not None:
            return all_reduce(self.stacked.run(x, logits, self.spec), self.group)
        weights, picks = route(logits, self.spec)
        run = self.run_picked if x.device.type == "cpu" else self.run_all
        return all_reduce(run(x, weights, picks), self.group)

    def advance(self, x: Tensor, norm: Norm | None, stream: Tensor | None) -> Tensor | None:
        """As `forward`, of x normed first where a norm is given; adds to the stream as `Linear.advance` does."""
        if norm is None:
            return self.forward(x)
        if stream is x and self._advance_alone(x, norm):
            return None
        return self.forward(norm.apply(x))

    def _advance_alone(self, stream: Tensor, norm: Norm) -> bool:
        router = _plain_matrix(self.router)
        if self.stacked is None or router is None or self.group.size > 1:
            return False
        return self.stacked.advance(stream, norm, router, self.spec)

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


def _plain_matrix(linear: Linear) -> Tensor | None:
    return linear.weight.weight if isinstance(linear.weight, DenseWeight) and linear.bias is None else None
