"""Gated activations on CUDA: one pass over gates and ups.

Behind the function of `kernels.activation`, which says what is computed. Knows tensors only.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.norm_rope import RowScale
from penstock.kernels.triton.launch import launcher
from penstock.kernels.triton.norm import row_factor
from penstock.kernels.triton.overlap import overlap_options, wait_for_inputs
from penstock.kernels.triton.sizes import ceil_divide, power_of_2

# Eight 2-byte numbers, so 16 bytes, a thread and load; one token of a small model still makes a dozen programs.
_BLOCK = 1024
_NUM_WARPS = 4


@triton.jit
def _gate_kernel(
    gate_up_ptr,
    rows_ptr,
    out_ptr,
    token_stride,
    eps,
    SIZE: tl.constexpr,
    ROW_SIZE: tl.constexpr,  # 0: nothing is left to scale
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gates_ptr = gate_up_ptr + token * token_stride
    gate = tl.load(gates_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates_ptr + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    if ROW_SIZE:
        factor = row_factor(rows_ptr, token, eps, ROW_SIZE, ROW_BLOCK)
        gate *= factor
        up *= factor
    exponent = gate
    if GELU:
        # gelu's tanh form, x (1 + tanh z) / 2, is x sigmoid(2 z).
        exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    # Where exp overflows, the quotient is zero, as it should be; nothing here can make a NaN of a finite gate.
    active = gate / (1.0 + tl.exp(-exponent))
    tl.store(out_ptr + token * SIZE + columns, (active * up).to(out_ptr.dtype.element_ty), mask=inside)


def gate(gate_up: Tensor, *, gelu: bool, scale: RowScale | None = None) -> Tensor:
    """gate_up: [tokens, 2 * n], gates first -> [tokens, n]."""
    assert gate_up.dim() == 2 and gate_up.stride(1) == 1
    assert scale is None or scale.rows.is_contiguous()
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, size)
    if num_tokens:
        grid = (num_tokens, ceil_divide(size, _BLOCK))
        row_size = 0 if scale is None else scale.rows.shape[1]
        launcher(_gate_kernel, grid)(
            gate_up,
            gate_up if scale is None else scale.rows,
            out,
            gate_up.stride(0),
            0.0 if scale is None else scale.eps,
            SIZE=size,
            ROW_SIZE=row_size,
            GELU=gelu,
            BLOCK=_BLOCK,
            ROW_BLOCK=power_of_2(max(row_size, 1)),
            num_warps=_NUM_WARPS,
            **overlap_options(out),
        )
    return out
