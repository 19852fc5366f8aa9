"""RMS norm with its weight.

The weight is float32 and whole: a family's offset (Gemma multiplies by one plus the stored weight) is added at load.
"""

from torch import Tensor

from penstock.kernels.norm_rope import add_rms_norm, rms_norm


class Norm:
    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight  # [n], or [heads, n] for norms of heads
        self.eps = eps

    def apply(self, x: Tensor) -> Tensor:
        """x: [..., n], over the last dimension."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add x to the residual stream in place and return the norm of the sum."""
        return add_rms_norm(x, residual, self.weight, self.eps)
