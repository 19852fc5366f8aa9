"""RMS norms on CUDA: one program for each row, everything between load and store in float32.

Behind the functions of `kernels.norm_rope`, which say what is computed. Knows tensors only.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.launch import launcher
from penstock.kernels.triton.overlap import overlap_options, wait_for_inputs
from penstock.kernels.triton.sizes import power_of_2


@triton.jit
def _norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    eps,
    SIZE: tl.constexpr,
    WEIGHT_ROWS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    at = row * SIZE + columns
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        # The norm sees the stream as it is kept, rounded, so that the next addition starts from the same numbers.
        kept = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + at, kept, mask=inside)
        x = kept.to(tl.float32)
    weight = tl.load(weight_ptr + (row % WEIGHT_ROWS) * SIZE + columns, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    tl.store(out_ptr + at, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def row_factor(rows_ptr, row, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return one over the root mean square of a row, for kernels that scale what a product left unscaled."""
    columns = tl.arange(0, BLOCK)
    x = tl.load(rows_ptr + row * SIZE + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [..., n]; weight: float32 [n] or [heads, n] with x: [tokens, heads, n]. Returns a new tensor like x."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, None, weight, out, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to the residual stream in place and return the norm of the sum. x, residual: [tokens, hidden]."""
    assert residual.is_contiguous()
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, residual, weight, out, eps)
    return out


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    size = x.shape[-1]
    num_rows = x.numel() // size
    if num_rows == 0:
        return
    block = power_of_2(size)
    launcher(_norm_kernel, (num_rows,))(
        x,
        x if residual is None else residual,
        weight,
        out,
        eps,
        SIZE=size,
        WEIGHT_ROWS=weight.numel() // size,
        ADD=residual is not None,
        BLOCK=block,
        # 16 numbers a thread: two 16-byte loads of each operand in flight, and a row is one wave of one program.
        num_warps=min(max(block // 512, 1), 16),
        **overlap_options(x),
    )
