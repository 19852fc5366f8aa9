"""RMS norm with its weight.

The weight is float32 and whole: a family's offset (Gemma multiplies by one plus the stored weight) is added at load.
"""

import torch
from torch import Tensor

from penstock.kernels.norm_rope import add_rms_norm, rms_norm


class Norm:
    def __init__(self, weight: Tensor, eps: float, *, is_bare: bool = False) -> None:
        self.weight = weight  # [n], or [heads, n] for norms of heads
        self.eps = eps
        self.is_bare = is_bare  # the weight is all ones: only a scale of rows is left

    @property
    def bared(self) -> "Norm":
        """What is left of this norm when its weight is in the matrix that follows."""
        return Norm(torch.ones_like(self.weight), self.eps, is_bare=True)

    def apply(self, x: Tensor) -> Tensor:
        """x: [..., n], over the last dimension."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add x to the residual stream in place and return the norm of the sum."""
        return add_rms_norm(x, residual, self.weight, self.eps)
