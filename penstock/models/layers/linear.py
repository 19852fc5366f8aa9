"""A matrix with an optional bias.

Knows nothing of how the matrix is kept: that is its weight format's.
"""

from torch import Tensor

from penstock.models.quant.interface import LinearWeight


class Linear:
    def __init__(self, weight: LinearWeight, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias  # [out_features]

    def apply(self, x: Tensor) -> Tensor:
        """x: [tokens, in_features] -> [tokens, out_features]."""
        return self.weight.apply(x, self.bias)

    def apply_wide(self, x: Tensor) -> Tensor:
        """As `apply`, in float32."""
        y = self.weight.apply_wide(x)
        return y if self.bias is None else y.add_(self.bias)
