"""A matrix with an optional bias.

Knows nothing of how the matrix is kept: that is its weight format's.
"""

from torch import Tensor

from penstock.kernels.activation import gate
from penstock.kernels.norm_rope import RowScale
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

    def apply_unscaled(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, RowScale | None]:
        """As `apply`, but where all that is left of the norm is a scale of rows, leave that to whoever comes next."""
        if norm is None or not norm.is_bare or self.bias is not None or not self.weight.defers_norm(x.shape[0]):
            return self.apply(x, norm), None
        return self.weight.apply(x), RowScale(x, norm.eps)

    def apply_gated(self, x: Tensor, norm: Norm | None = None, *, gelu: bool) -> Tensor:
        """Take the rows as gates and then as many ups, and return act(gates) * ups of `apply`: [tokens, out / 2]."""
        if norm is None or self.weight.gates(x.shape[0]):
            return self.weight.apply_gated(x if norm is None else norm.apply(x), self.bias, gelu=gelu)
        product, scale = self.apply_unscaled(x, norm)
        return gate(product, gelu=gelu, scale=scale)

    def take_in(self, norm: Norm) -> Norm:
        """Take the weight of the norm before this matrix into it; return what is left of the norm."""
        return norm.bared if self.weight.scale_inputs(norm.weight) else norm

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
