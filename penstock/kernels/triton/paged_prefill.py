"""Paged causal attention of many query tokens per slice on CUDA.

A program takes one tile of a slice's query tokens with all query heads of one key-value head, and walks over the keys
those tokens may see. Packing the heads of a group into one tile keeps it short in tokens, so little is computed that
the causal mask throws away, and a handful of tokens (a short suffix, drafts to verify) still fills it. Which tiles
there are is a list from the host; a captured launch has room for the longest and skips what is not filled. Knows
tensors, blocks and lengths.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.attention.interface import LayerAttention
from penstock.kernels.triton.launch import launcher
from penstock.kernels.triton.paged_decode import NO_WINDOW, soft_cap
from penstock.kernels.triton.sizes import power_of_2

# What stands in the list of tiles instead of a slice: nothing to do, or rows of the output that are nobody's, to be
# filled with zeros from the token that follows.
NO_TILE, SPARE_TILE = -1, -2
# Tiles whose keys to see differ by less take about the same time.
_ALIKE_KEYS = 256


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """The shape of one program's work."""

    rows: int  # query tokens x query heads of a group
    keys: int  # keys and values read at a time
    num_warps: int
    num_stages: int

    def tokens(self, layer: LayerAttention) -> int:
        return self.rows // (layer.num_heads // layer.num_kv_heads)


@cache
def prefill_tile(layer: LayerAttention, dtype: torch.dtype) -> PrefillTile:
    """Tiles whose operands fit a multiprocessor's shared memory and registers: twice where heads are narrow."""
    row_bytes = power_of_2(layer.head_dim) * dtype.itemsize
    if row_bytes <= 256:
        shape = PrefillTile(rows=64, keys=64, num_warps=4, num_stages=3)
    elif row_bytes <= 512:
        shape = PrefillTile(rows=64, keys=32, num_warps=4, num_stages=3)
    else:
        shape = PrefillTile(rows=32, keys=32, num_warps=4, num_stages=2)
    group = layer.num_heads // layer.num_kv_heads
    if group <= shape.rows:
        return shape
    return PrefillTile(power_of_2(group), shape.keys, shape.num_warps, shape.num_stages)


def list_tiles(
    query_starts: Sequence[int] | np.ndarray, context_lens: Sequence[int] | np.ndarray, tile_tokens: int
) -> np.ndarray:
    """Return [tiles, 2] int32: a slice and the first of its query tokens; the tiles with most keys to see come first.

    Those that see about as many go slice by slice: programs that run side by side then read the same keys.
    `query_starts` has one entry more than there are slices.
    """
    starts = np.asarray(query_starts, np.int64)
    sizes = np.diff(starts)
    counts = -(-sizes // tile_tokens)
    slices = np.repeat(np.arange(len(sizes)), counts)
    firsts = (np.arange(len(slices)) - np.repeat(np.cumsum(counts) - counts, counts)) * tile_tokens
    seen = np.asarray(context_lens, np.int64)[slices] - sizes[slices] + firsts
    order = np.lexsort((-seen, slices, -(seen // _ALIKE_KEYS)))
    return np.stack([slices[order], firsts[order]], axis=1).astype(np.int32)


@triton.jit
def _walk_keys(
    output,
    sums,
    highest,
    q,
    position,  # [ROWS] of each row's token
    pool_ptr,
    table_ptr,
    begin,
    end,
    value_offset,
    scale,
    cap,
    window,
    KEY_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Go on with the online softmax over the keys from `begin` to `end`, whole tiles unless masked."""
    dim = tl.arange(0, DIMS)[None, :]
    # Block numbers are read one tile ahead, or the pipeline would spend half its depth on them.
    key = begin + tl.arange(0, TILE)
    block = tl.load(table_ptr + key // BLOCK_TOKENS, mask=key < end, other=0)
    for start in range(begin, end, TILE):
        key = start + tl.arange(0, TILE)
        slot = block.to(tl.int64) * BLOCK_TOKENS + key % BLOCK_TOKENS
        at = pool_ptr + slot[:, None] * KEY_STRIDE + dim
        following = key + TILE
        block = tl.load(table_ptr + following // BLOCK_TOKENS, mask=following < end, other=0)
        inside = dim < HEAD_DIM
        keys = tl.load(at, mask=inside, other=0.0)  # [TILE, DIMS]
        if MASKED:
            # Past the end stands memory of others: a value that is not a number would spread even at weight zero.
            inside = inside & (key < end)[:, None]
        values = tl.load(at + value_offset, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision=PRECISION)  # [ROWS, TILE]
        # Scores stay as the product gave them until they are weighed, where the scale is part of one multiply-add.
        sharpness = scale * 1.4426950408889634
        if SOFTCAP:
            scores = soft_cap(scores * scale, cap)
            sharpness = 1.4426950408889634
        if MASKED:
            behind = position[:, None] - key[None, :]
            scores = tl.where((behind >= 0) & (behind < window), scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1) * sharpness)
        # A row may have seen nothing yet, where a window begins inside the tile.
        level = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        shrink = tl.exp2(highest - level)
        weights = tl.exp2(scores * sharpness - level[:, None])
        sums = sums * shrink + tl.sum(weights, axis=1)
        output = output * shrink[:, None]
        output = tl.dot(weights.to(q.dtype), values.to(q.dtype), output, input_precision=PRECISION)
        highest = higher
    return output, sums, highest


@triton.jit
def _clear_rows(
    out_ptr,
    first,
    num_tokens,
    key_head,
    GROUP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Write zeros to a tile of the output."""
    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    dim = tl.arange(0, DIMS)
    filled = ((row < ROWS // GROUP * GROUP) & (token < num_tokens))[:, None] & (dim < HEAD_DIM)[None, :]
    in_head = ((key_head * GROUP + row % GROUP) * HEAD_DIM)[:, None] + dim[None, :]
    at = out_ptr + token.to(tl.int64)[:, None] * (KEY_HEADS * GROUP * HEAD_DIM) + in_head
    tl.store(at, tl.zeros([ROWS, DIMS], out_ptr.dtype.element_ty), mask=filled)


@triton.jit(
    do_not_specialize=["window", "table_stride", "num_tokens"],
    do_not_specialize_on_alignment=["lens_ptr", "starts_ptr", "tables_ptr", "tiles_ptr"],
)
def _prefill_kernel(
    q_ptr,  # [tokens, query heads, head_dim]
    pool_ptr,  # [2, blocks, block_tokens, key heads, head_dim]
    tables_ptr,  # [slices, blocks] int32
    lens_ptr,  # [slices] int32
    starts_ptr,  # [slices + 1] int32
    tiles_ptr,  # [tiles, 2] int32
    out_ptr,  # [tokens, query heads * head_dim]
    scale,
    cap,
    window,
    q_stride,
    table_stride,
    value_offset,
    num_tokens,
    GROUP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOWED: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    SPARE: tl.constexpr,
):
    key_head = tl.program_id(0)
    tile_ptr = tiles_ptr + 2 * tl.program_id(1)
    piece = tl.load(tile_ptr).to(tl.int64)
    first = tl.load(tile_ptr + 1)
    if piece < 0:
        if piece == SPARE:
            _clear_rows(out_ptr, first, num_tokens, key_head, GROUP, KEY_HEADS, HEAD_DIM, ROWS, DIMS)
        return
    query_begin = tl.load(starts_ptr + piece)
    num_queries = tl.load(starts_ptr + piece + 1) - query_begin
    cached = tl.load(lens_ptr + piece) - num_queries  # tokens before the slice's first query

    tokens: tl.constexpr = ROWS // GROUP
    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    dim = tl.arange(0, DIMS)
    filled = ((row < tokens * GROUP) & (token < num_queries))[:, None] & (dim < HEAD_DIM)[None, :]
    in_head = ((key_head * GROUP + row % GROUP) * HEAD_DIM)[:, None] + dim[None, :]
    packed = (query_begin + token).to(tl.int64)[:, None]
    q = tl.load(q_ptr + packed * q_stride + in_head, mask=filled, other=0.0)

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, DIMS], tl.float32)
    position = cached + token
    pool_ptr += key_head * HEAD_DIM
    tables_ptr += piece * table_stride
    end = cached + tl.minimum(first + tokens, num_queries)
    if WINDOWED:
        seen_by_all = tl.maximum(cached + first + 1 - window, 0) // TILE * TILE
    else:
        # Every row sees all keys up to the tile's first token: whole tiles of those need no mask.
        seen_by_all = (cached + first + 1) // TILE * TILE
        output, sums, highest = _walk_keys(
            output, sums, highest, q, position, pool_ptr, tables_ptr, 0, seen_by_all, value_offset, scale, cap, window,
            KEY_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_TOKENS, SOFTCAP, DIMS, TILE, PRECISION, False,
        )  # fmt: skip
    output, sums, highest = _walk_keys(
        output, sums, highest, q, position, pool_ptr, tables_ptr, seen_by_all, end, value_offset, scale, cap, window,
        KEY_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_TOKENS, SOFTCAP, DIMS, TILE, PRECISION, True,
    )  # fmt: skip
    output = output / tl.where(sums > 0.0, sums, 1.0)[:, None]
    out_at = packed * (KEY_HEADS * GROUP * HEAD_DIM) + in_head
    tl.store(out_ptr + out_at, output.to(out_ptr.dtype.element_ty), mask=filled)


def paged_prefill(
    q: Tensor,
    pool: Tensor,
    block_tables: Tensor,
    lens: Tensor,
    starts: Tensor,
    tiles: Tensor,
    out: Tensor,
    layer: LayerAttention,
    tile: PrefillTile | None = None,
) -> None:
    """Attend with the listed tiles of query tokens and write their rows of `out`.

    q: [tokens, query heads, head_dim], tokens may be further apart; pool: [2, blocks, block_tokens, key heads,
    head_dim]; block_tables: [slices, blocks] int32; lens: [slices], starts: [slices + 1], tiles: [tiles, 2], all int32;
    out: [tokens, query heads * head_dim]. `tiles` must be listed for this tile's number of tokens.
    """
    _, num_heads, head_dim = q.shape
    _, _, block_tokens, num_kv_heads, _ = pool.shape
    assert q.stride(1) == head_dim and q.stride(2) == 1
    assert pool.is_contiguous() and out.is_contiguous() and block_tables.stride(1) == 1 and tiles.is_contiguous()
    num_tiles = tiles.shape[0]
    if num_tiles == 0:
        return
    tile = tile or prefill_tile(layer, pool.dtype)
    launcher(_prefill_kernel, (num_kv_heads, num_tiles))(
        q,
        pool,
        block_tables,
        lens,
        starts,
        tiles,
        out,
        layer.scale,
        layer.softcap or 1.0,
        layer.window or NO_WINDOW,
        q.stride(0),
        block_tables.stride(0),
        pool.stride(0),
        q.shape[0],
        GROUP=num_heads // num_kv_heads,
        KEY_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_TOKENS=block_tokens,
        SOFTCAP=layer.softcap is not None,
        WINDOWED=layer.window is not None,
        ROWS=tile.rows,
        DIMS=power_of_2(head_dim),
        TILE=tile.keys,
        PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
        SPARE=SPARE_TILE,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
