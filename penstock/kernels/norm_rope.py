"""RMS norms and rotary embedding: the small operations between the matrix products.

Plain torch, right on every device and dtype; on CUDA a fused kernel stands behind the norms. Knows tensors only.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowScale:
    """What rows are yet to be multiplied with, each as a whole: one over the root mean square of these.

    Norms without a weight commute with matrix products, so a product may come first and leave the norm to what follows.
    """

    rows: Tensor  # [tokens, n]
    eps: float

    def factors(self) -> Tensor:
        """[tokens, 1] float32."""
        return self.rows.float().square().mean(dim=-1, keepdim=True).add_(self.eps).rsqrt_()


@cache
def _constant(value: float) -> Tensor:
    return torch.tensor(value)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension, computed in float32.

    x: [..., n]; weight: float32, [n] or any shape that broadcasts against x, such as [heads, n].
    """
    if x.is_cuda:
        from penstock.kernels.triton import norm

        return norm.rms_norm(x, weight, eps)
    if x.dtype != torch.float32:
        return rms_norm(x.float(), weight, eps).to(x.dtype)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    # A plain number also while the norm is recorded.
    mean_square = torch.addcmul(_constant(eps), length, length, value=1 / int(x.shape[-1]))
    return x.mul(mean_square.rsqrt_()).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to the residual stream in place and return the norm of the sum. x, residual: [tokens, hidden]."""
    if x.is_cuda:
        from penstock.kernels.triton import norm

        return norm.add_rms_norm(x, residual, weight, eps)
    return rms_norm(residual.add_(x), weight, eps)


def apply_rope(heads: Tensor, rotation: Tensor) -> None:
    """Rotate queries and keys in place.

    heads: [tokens, heads, head_dim], the first rotary_dim of each head in neighbouring pairs (real, imaginary);
    rotation: [tokens, 1, rotary_dim / 2] complex64, cos + i sin of each token's position.
    """
    rotary_dim = 2 * rotation.shape[-1]
    if rotary_dim < heads.shape[-1]:
        heads = heads[..., :rotary_dim]
    if heads.dtype == torch.float32:
        heads.view(torch.complex64).mul_(rotation)
    else:
        turned = heads.float().view(torch.complex64).mul_(rotation)
        heads.copy_(turned.view(torch.float32))
