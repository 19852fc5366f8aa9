"""Gated activations of feed-forward layers.

Plain torch, right on every device and dtype; on CUDA a fused kernel stands behind each function. Knows tensors only.
"""

from torch import Tensor
from torch.nn import functional


def silu_gate(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up. gate_up: [tokens, 2 * n], gates first -> [tokens, n]."""
    if gate_up.is_cuda:
        from penstock.kernels.triton import activation

        return activation.silu_gate(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def gelu_tanh_gate(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up with gelu's tanh approximation. gate_up: [tokens, 2 * n], gates first -> [tokens, n]."""
    if gate_up.is_cuda:
        from penstock.kernels.triton import activation

        return activation.gelu_tanh_gate(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def gate(gate_up: Tensor, *, gelu: bool) -> Tensor:
    """Return `gelu_tanh_gate` or else `silu_gate` of gates and ups."""
    return gelu_tanh_gate(gate_up) if gelu else silu_gate(gate_up)
