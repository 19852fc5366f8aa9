"""Gated activations of feed-forward layers.

Plain torch, right on every device and dtype; on CUDA a fused kernel stands behind each function. Knows tensors only.
"""

from torch import Tensor
from torch.nn import functional

from penstock.kernels.norm_rope import RowScale


def gate(gate_up: Tensor, *, gelu: bool, scale: RowScale | None = None) -> Tensor:
    """Return act(gate) * up, with silu or gelu's tanh approximation, of rows that are scaled first where that is left.

    gate_up: [tokens, 2 * n], gates first -> [tokens, n].
    """
    if gate_up.is_cuda:
        from penstock.kernels.triton import activation

        return activation.gate(gate_up, gelu=gelu, scale=scale)
    if scale is not None:
        gate_up = (gate_up * scale.factors()).to(gate_up.dtype)
    gates, ups = gate_up.chunk(2, dim=-1)
    active = functional.gelu(gates, approximate="tanh") if gelu else functional.silu(gates)
    return active.mul_(ups)
