"""From the fused projection to the cache on CUDA: norm of heads, rotation, write of keys and values, in one launch.

Knows tensors and slots. Knows nothing of block tables or of attention.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.norm_rope import RowScale
from penstock.kernels.triton.launch import launcher
from penstock.kernels.triton.norm import row_factor
from penstock.kernels.triton.overlap import overlap_options, wait_for_inputs
from penstock.kernels.triton.sizes import ceil_divide, power_of_2

# A program takes this many heads of one token: it reads the token's rotation once for all of them.
_HEADS_PER_PROGRAM = 8


@triton.jit
def _rope_cache_kernel(
    heads_ptr,  # [tokens, query + key + value heads, head_dim]
    rows_ptr,  # [tokens, ROW_SIZE]
    rotation_ptr,  # [tokens, ROTARY / 2, 2] float32
    weight_ptr,  # [query + key heads, head_dim] float32
    pool_ptr,  # [2, slots, key heads, head_dim]
    slots_ptr,  # [tokens] int64
    token_stride,
    rotation_stride,
    value_offset,  # numbers from a slot's keys to its values
    eps,
    row_eps,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    ROW_SIZE: tl.constexpr,  # 0: nothing is left to scale
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]  # [HEADS, 1]
    dim = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = (head < QUERY_HEADS + 2 * KEY_HEADS) & (dim < HEAD_DIM)
    at = heads_ptr + token * token_stride + head * HEAD_DIM + dim
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)  # [HEADS, BLOCK]
    slot = tl.load(slots_ptr + token)  # read here and not where it is used: no load may pass the store before that
    is_turned = head < QUERY_HEADS + KEY_HEADS
    if ROW_SIZE:
        x *= row_factor(rows_ptr, token, row_eps, ROW_SIZE, ROW_BLOCK)
    if NORM:
        weight = tl.load(weight_ptr + head * HEAD_DIM + dim, mask=is_turned & (dim < HEAD_DIM), other=0.0)
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)
        x = tl.where(is_turned, x * scale[:, None] * weight, x)

    # Dimensions past the rotary ones, and values, turn by nothing.
    turn = tl.load(rotation_ptr + token * rotation_stride + dim, mask=dim < ROTARY, other=0.0)
    cos, sin = tl.split(tl.reshape(turn, (1, BLOCK // 2, 2)))  # [1, BLOCK / 2]
    turns = is_turned & (tl.arange(0, BLOCK // 2)[None, :] < ROTARY // 2)  # [HEADS, BLOCK / 2]
    cos, sin = tl.where(turns, cos, 1.0), tl.where(turns, sin, 0.0)
    real, imaginary = tl.split(tl.reshape(x, (HEADS, BLOCK // 2, 2)))
    turned = tl.join(real * cos - imaginary * sin, real * sin + imaginary * cos)
    x = tl.reshape(turned, (HEADS, BLOCK)).to(heads_ptr.dtype.element_ty)

    tl.store(at, x, mask=inside & is_turned)
    cached = head - QUERY_HEADS - tl.where(is_turned, 0, KEY_HEADS)  # which key or value head
    into = pool_ptr + slot * (KEY_HEADS * HEAD_DIM) + tl.where(is_turned, 0, value_offset) + cached * HEAD_DIM + dim
    tl.store(into, x.to(pool_ptr.dtype.element_ty), mask=inside & (head >= QUERY_HEADS) & (slot >= 0))


def rotate_and_cache(
    heads: Tensor,
    rotation: Tensor,
    norm: tuple[Tensor, float] | None,
    slots: Tensor,
    pool: Tensor,
    scale: RowScale | None = None,
    *,
    num_heads: int,
) -> None:
    """Norm and rotate queries and keys in place, and copy the keys and the values to the pool.

    heads: [tokens, query + key + value heads, head_dim], rows of whole tokens; rotation: complex64
    [tokens, 1, rotary_dim / 2]; norm: (float32 weight [query + key heads, head_dim], eps); slots: [tokens] int64, below
    zero where nothing is to be written; pool: [2, blocks, block_tokens, key heads, head_dim]; scale: what a
    token's heads are multiplied with before.
    """
    num_tokens, all_heads, head_dim = heads.shape
    num_kv_heads = pool.shape[3]
    assert all_heads == num_heads + 2 * num_kv_heads
    assert heads.stride(1) == head_dim and heads.stride(2) == 1
    assert scale is None or scale.rows.is_contiguous()
    assert pool.is_contiguous() and rotation.stride(-1) == 1
    if num_tokens == 0:
        return
    turns = torch.view_as_real(rotation)  # [tokens, 1, rotary_dim / 2, 2]
    weight, eps = (turns, 0.0) if norm is None else norm
    row_size = 0 if scale is None else scale.rows.shape[1]
    launcher(_rope_cache_kernel, (num_tokens, ceil_divide(all_heads, _HEADS_PER_PROGRAM)))(
        heads,
        heads if scale is None else scale.rows,
        turns,
        weight,
        pool,
        slots,
        heads.stride(0),
        turns.stride(0),
        pool.stride(0),
        eps,
        0.0 if scale is None else scale.eps,
        QUERY_HEADS=num_heads,
        KEY_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROTARY=2 * rotation.shape[-1],
        ROW_SIZE=row_size,
        NORM=norm is not None,
        HEADS=_HEADS_PER_PROGRAM,
        BLOCK=power_of_2(head_dim),
        ROW_BLOCK=power_of_2(max(row_size, 1)),
        num_warps=4,
        **overlap_options(heads),
    )
