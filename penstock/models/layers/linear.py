"""A matrix with an optional bias.

Knows nothing of how the matrix is kept: that is its weight format's.
"""

from torch import Tensor

from penstock.kernels.activation import gate
from penstock.models.layers.norm import Norm
from penstock.models.quant.interface import LinearWeight
from penstock.parallel.collectives import all_reduce
from penstock.parallel.groups import Group


class Linear:
    def __init__(self, weight: LinearWeight, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias  # [out_features]

    def apply(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        """x: [tokens, in_features], to be normed first where a norm is given -> [tokens, out_features]."""
        if norm is None:
            return self.weight.apply(x, self.bias)
        return self.weight.apply_normed(x, norm.weight, norm.eps, self.bias)

    def apply_gated(self, x: Tensor, norm: Norm | None = None, *, gelu: bool) -> Tensor:
        """Take the rows as gates and then as many ups, and return act(gates) * ups of `apply`: [tokens, out / 2]."""
        if norm is None:
            return self.weight.apply_gated(x, self.bias, gelu=gelu)
        return gate(self.apply(x, norm), gelu=gelu)

    def apply_wide(self, x: Tensor) -> Tensor:
        """As `apply`, in float32."""
        y = self.weight.apply_wide(x)
        return y if self.bias is None else y.add_(self.bias)

    def advance(self, x: Tensor, stream: Tensor | None, group: Group) -> Tensor | None:
        """Add the product, whose parts the ranks of the group hold, to the stream in place and return None.

        Where there is no stream, or no kernel that adds to it, return the product instead.
        """
        if stream is not None and group.size == 1 and self.bias is None and self.weight.add(x, stream):
            return None
        return all_reduce(self.apply(x), group)
