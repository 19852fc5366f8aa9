"""Paged attention of one query token per slice on CUDA, split over the context.

A program takes one slice, one key-value head with all its query heads, and one part of the context. Contexts and block
tables are read from device memory and the grid depends on nothing but shapes, so a captured launch stays right while
lengths change; a program that finds no work exits. So may be into how many parts contexts are cut, where a launch is
captured for any number of slices. Where a slice has several parts, the program that ends last merges them, so that a
layer is one launch. Knows tensors, blocks and lengths; nothing of prefill.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.attention.interface import LayerAttention
from penstock.kernels.triton.launch import launcher
from penstock.kernels.triton.overlap import overlap_options, wait_for_inputs, warm_cache
from penstock.kernels.triton.sizes import power_of_2

# The narrowest tensor-core tile: query heads that share a key head are padded to this many rows.
_MIN_ROWS = 16
# More than this many parts cost more to merge than they save.
_MAX_SPLITS = 64
# Programs per multiprocessor that keep the memory busy: below this, contexts are split; above, only very long ones.
_PROGRAMS_PER_MULTIPROCESSOR = 3
_LONG_SPLIT_TOKENS = 4096
# Contexts are cut into so many parts where few programs run, and how long each waits for memory is what counts: then
# they ask for their first keys and values ahead of the query.
_WARMED_SPLITS = 10
_LINE_BYTES = 128
# Stands for "no window": longer than any context, and no overflow when subtracted.
NO_WINDOW = 1 << 30


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """How a program walks over its part of the context."""

    tokens: int  # keys and values read at a time
    num_warps: int
    num_stages: int


@cache
def decode_tile(layer: LayerAttention, dtype: torch.dtype) -> DecodeTile:
    """Tiles of 8 KiB of keys and as much of values, three in flight and one in use.

    One warp needs no barriers, and several such programs share a multiprocessor; more only where the accumulators of
    one would not fit its registers.
    """
    dims = power_of_2(layer.head_dim)
    rows = max(power_of_2(layer.num_heads // layer.num_kv_heads), _MIN_ROWS)
    tokens = min(max(8192 // (dims * dtype.itemsize), 16), 64)
    return DecodeTile(tokens, num_warps=min(max(rows * dims // 2048, 1), 8), num_stages=4)


@dataclass(frozen=True, slots=True)
class Splits:
    """How contexts are divided: into at most `count` parts, none shorter than `min_tokens` but the last."""

    count: int
    min_tokens: int

    def num_parts(self, num_slices: int) -> int:
        """Of all slices together, at most."""
        return num_slices * self.count


@dataclass(frozen=True, slots=True)
class ChosenSplits:
    """Splits that a launch finds on the device: one that is captured for any number of slices cannot know them."""

    numbers: Tensor  # [2] int32: count and min_tokens
    most_parts: int  # of all slices together, whatever is chosen

    def num_parts(self, num_slices: int) -> int:
        return self.most_parts


def choose_splits(num_slices: int, num_kv_heads: int, max_context: int, num_multiprocessors: int) -> Splits:
    """Divide contexts so that the device is full. Depends on shapes alone, so it may be fixed at capture."""
    programs = max(num_slices * num_kv_heads, 1)
    wanted = -(-_PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // programs)
    if wanted > 1:
        min_tokens = 32
        return Splits(max(min(wanted, _MAX_SPLITS, -(-max_context // min_tokens)), 1), min_tokens)
    return Splits(_num_long_parts(max_context), _LONG_SPLIT_TOKENS)


def most_parts(num_slices: int, num_kv_heads: int, max_context: int, num_multiprocessors: int) -> int:
    """No fewer than the parts that `choose_splits` makes of any so many slices or fewer, with any such context."""
    filling = -(-_PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // num_kv_heads)
    # Rounded up, each slice may have one part more than fills the device.
    return max(filling + num_slices, num_slices * _num_long_parts(max_context))


def _num_long_parts(max_context: int) -> int:
    """Of a context, where there are slices enough to fill the device."""
    return min(max(-(-max_context // _LONG_SPLIT_TOKENS), 1), 8)


@dataclass(slots=True)
class DecodeWorkspace:
    """Room for the parts of one launch at a time. `arrivals` is zero between launches: whoever merges resets it."""

    outputs: Tensor  # [parts * query heads * head_dim] float32 or longer
    log_sums: Tensor  # [parts * query heads] float32 or longer
    arrivals: Tensor  # [slices * key heads] int32 or longer

    @classmethod
    def of(cls, num_parts: int, layer: LayerAttention, device: torch.device) -> "DecodeWorkspace":
        """Room for so many parts of all slices together."""
        return cls(
            torch.empty(num_parts * layer.num_heads * layer.head_dim, dtype=torch.float32, device=device),
            torch.empty(num_parts * layer.num_heads, dtype=torch.float32, device=device),
            torch.zeros(num_parts * layer.num_kv_heads, dtype=torch.int32, device=device),
        )

    def fits(self, num_parts: int, layer: LayerAttention) -> bool:
        return (
            num_parts * layer.num_heads * layer.head_dim <= self.outputs.numel()
            and num_parts * layer.num_heads <= self.log_sums.numel()
            and num_parts * layer.num_kv_heads <= self.arrivals.numel()
        )


@triton.jit
def soft_cap(scores, cap):
    """cap * tanh(scores / cap), by an exponential that may overflow harmlessly."""
    return cap - 2.0 * cap / (1.0 + tl.exp(2.0 / cap * scores))


@triton.jit
def _own_part(chosen_ptr, splits, min_split_tokens, CHOSEN: tl.constexpr):
    """Return a program's key head, slice and part, and into how many parts of which least size contexts are cut."""
    piece = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    if CHOSEN:  # programs that have work come first
        splits = tl.maximum(tl.load(chosen_ptr), 1)
        min_split_tokens = tl.load(chosen_ptr + 1)
        split = (piece % splits).to(tl.int32)
        piece = piece // splits
    return tl.program_id(0), piece, split, splits, min_split_tokens


@triton.jit
def _part(context, window, splits, min_split_tokens, split, TILE: tl.constexpr):
    """Where a part of the visible context begins and ends, and how many parts there are."""
    first = tl.maximum(context - window, 0)
    span = context - first
    parts = tl.maximum(tl.minimum(tl.cdiv(span, min_split_tokens), splits), 1)
    part_tokens = tl.maximum(tl.cdiv(tl.cdiv(span, parts), TILE), 1) * TILE
    begin = first + split * part_tokens
    return begin, tl.minimum(begin + part_tokens, context), tl.maximum(tl.cdiv(span, part_tokens), 1)


@triton.jit
def _warm_part(
    pool_ptr,  # at this program's head
    table_ptr,
    begin,
    end,
    value_offset,
    KEY_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    LINES: tl.constexpr,
):
    """Ask for the first tile of a part's keys and values, without waiting for it."""
    token = begin + tl.arange(0, TILE)
    block = tl.load(table_ptr + token // BLOCK_TOKENS, mask=token < end, other=0).to(tl.int64)
    line = tl.arange(0, LINES)[None, :] * (HEAD_DIM // LINES)
    at = pool_ptr + (block * BLOCK_TOKENS + token % BLOCK_TOKENS)[:, None] * KEY_STRIDE + line
    warm_cache(at)
    warm_cache(at + value_offset)


@triton.jit
def _attend_part(
    q,
    pool_ptr,  # of the first key head's first slot, at this program's head
    table_ptr,
    begin,
    end,
    value_offset,
    scale,
    cap,
    KEY_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax over the keys from `begin` to `end`. Returns unnormalised output, sums and maxima (base 2)."""
    dim = tl.arange(0, DIMS)[None, :]
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([ROWS, TILE], tl.float32)  # added up after the loop: adding across warps costs a barrier
    output = tl.zeros([ROWS, DIMS], tl.float32)
    # Block numbers are read one tile ahead: were they read where they are used, the pipeline that keeps keys and values
    # in flight would spend half its depth on them.
    token = begin + tl.arange(0, TILE)
    block = tl.load(table_ptr + token // BLOCK_TOKENS, mask=token < end, other=0)
    for start in range(begin, end, TILE):
        token = start + tl.arange(0, TILE)
        visible = token < end
        slot = block.to(tl.int64) * BLOCK_TOKENS + token % BLOCK_TOKENS
        at = pool_ptr + slot[:, None] * KEY_STRIDE + dim
        token += TILE
        block = tl.load(table_ptr + token // BLOCK_TOKENS, mask=token < end, other=0)
        # Past the end stands another request's memory, or none: any score is replaced below, but a value that is not a
        # number would spread even at weight zero.
        keys = tl.load(at, mask=dim < HEAD_DIM, other=0.0)  # [TILE, DIMS]
        values = tl.load(at + value_offset, mask=visible[:, None] & (dim < HEAD_DIM), other=0.0)
        scores = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision=PRECISION)  # [ROWS, TILE]
        # Scores stay as the product gave them until they are weighed, where the scale is part of one multiply-add.
        sharpness = scale * 1.4426950408889634
        if SOFTCAP:
            scores = soft_cap(scores * scale, cap)
            sharpness = 1.4426950408889634
        scores = tl.where(visible[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1) * sharpness)
        shrink = tl.exp2(highest - higher)
        weights = tl.exp2(scores * sharpness - higher[:, None])
        sums = sums * shrink[:, None] + weights
        output = output * shrink[:, None]
        output = tl.dot(weights.to(q.dtype), values.to(q.dtype), output, input_precision=PRECISION)
        highest = higher
    return output, tl.sum(sums, axis=1), highest


@triton.jit
def _merge_parts(
    outputs_ptr,  # of this slice's and head's first part
    log_sums_ptr,
    num_parts,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Weigh the parts by their sums, `PARTS` of them at a time. Returns [HEADS, DIMS]."""
    head = tl.arange(0, HEADS)
    dim = tl.arange(0, DIMS)
    highest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    merged = tl.zeros([HEADS, DIMS], tl.float32)
    for first in range(0, num_parts, PARTS):
        part = first + tl.arange(0, PARTS)
        there = (part < num_parts)[:, None]
        row = part[:, None] * GROUP + head[None, :]  # [PARTS, HEADS]
        filled = there & (head < GROUP)[None, :]
        # Written by other multiprocessors during this launch: read past the first-level cache.
        log_sums = tl.load(log_sums_ptr + row, mask=filled, other=0.0, cache_modifier=".cg")
        log_sums = tl.where(there, log_sums, float("-inf"))
        outputs = tl.load(
            outputs_ptr + row[:, :, None] * HEAD_DIM + dim[None, None, :],
            mask=filled[:, :, None] & (dim < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(highest, tl.max(log_sums, axis=0))
        shrink = tl.exp2(highest - higher)
        weights = tl.exp2(log_sums - higher[None, :])
        total = total * shrink + tl.sum(weights, axis=0)
        merged = merged * shrink[:, None] + tl.sum(outputs * weights[:, :, None], axis=0)
        highest = higher
    return merged / total[:, None]


@triton.jit
def _hand_in(
    output,  # [ROWS, DIMS] of this part
    log_sums,  # [ROWS]
    out_ptr,  # all of these: of this slice's and head's first
    outputs_ptr,
    log_sums_ptr,
    arrival_ptr,
    split,
    parts,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Leave a part in the workspace; whoever is last to do so merges them all."""
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    at = (split * GROUP + row)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(outputs_ptr + at, output, mask=(row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :])
    tl.store(log_sums_ptr + split * GROUP + row, log_sums, mask=row < GROUP)
    # Every thread's part must be written before the arrival is counted.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrival_ptr, 1, sem="acq_rel", scope="gpu")
    if arrived == parts - 1:
        merged = _merge_parts(outputs_ptr, log_sums_ptr, parts, GROUP, HEAD_DIM, HEADS, DIMS, PARTS)
        head = tl.arange(0, HEADS)
        tl.store(
            out_ptr + head[:, None] * HEAD_DIM + dim[None, :],
            merged.to(out_ptr.dtype.element_ty),
            mask=(head < GROUP)[:, None] & (dim < HEAD_DIM)[None, :],
        )
        tl.store(arrival_ptr, 0)


@triton.jit(
    do_not_specialize=["num_slices", "splits", "min_split_tokens", "window", "table_stride"],
    do_not_specialize_on_alignment=["lens_ptr", "tables_ptr", "chosen_ptr"],
)
def _decode_kernel(
    q_ptr,  # [slices, query heads, head_dim]
    pool_ptr,  # [2, blocks, block_tokens, key heads, head_dim]
    tables_ptr,  # [slices, blocks] int32
    lens_ptr,  # [slices] int32
    out_ptr,  # [slices, query heads * head_dim]
    outputs_ptr,
    log_sums_ptr,
    arrivals_ptr,
    chosen_ptr,  # [2] int32: splits and min_split_tokens, where they are chosen
    scale,
    cap,
    window,
    num_slices,
    q_stride,
    table_stride,
    value_offset,
    splits,
    min_split_tokens,
    GROUP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    WARM: tl.constexpr,
    CHOSEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # Lengths, tables and all that was cached but the last token are older than the launch before this one.
    key_head, piece, split, splits, min_split_tokens = _own_part(chosen_ptr, splits, min_split_tokens, CHOSEN)
    pool_ptr += key_head * HEAD_DIM
    tables_ptr += piece * table_stride
    context = tl.load(lens_ptr + piece, mask=piece < num_slices, other=0)
    begin, end, parts = _part(context, window, splits, min_split_tokens, split, TILE)
    if OVERLAP and WARM:
        _warm_part(
            pool_ptr, tables_ptr, begin, end, value_offset, KEY_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_TOKENS, TILE, WARM
        )
    wait_for_inputs(OVERLAP)
    if (context == 0) | (split >= parts):
        return

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    filled = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    in_head = row[:, None] * HEAD_DIM + dim[None, :]
    q = tl.load(q_ptr + piece * q_stride + key_head * GROUP * HEAD_DIM + in_head, mask=filled, other=0.0)
    output, total, highest = _attend_part(
        q, pool_ptr, tables_ptr, begin, end, value_offset, scale, cap,
        KEY_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_TOKENS, SOFTCAP, ROWS, DIMS, TILE, PRECISION,
    )  # fmt: skip
    output = output / total[:, None]
    place = piece * KEY_HEADS + key_head
    out_ptr += place * (GROUP * HEAD_DIM)
    if parts == 1:
        tl.store(out_ptr + in_head, output.to(out_ptr.dtype.element_ty), mask=filled)
        return

    _hand_in(
        output,
        highest + tl.log2(total),
        out_ptr,
        outputs_ptr + place * splits * (GROUP * HEAD_DIM),
        log_sums_ptr + place * splits * GROUP,
        arrivals_ptr + place,
        split,
        parts,
        GROUP, HEAD_DIM, ROWS, HEADS, DIMS, PARTS,
    )  # fmt: skip


def paged_decode(
    q: Tensor,
    pool: Tensor,
    block_tables: Tensor,
    lens: Tensor,
    out: Tensor,
    layer: LayerAttention,
    splits: Splits | ChosenSplits,
    workspace: DecodeWorkspace,
    tile: DecodeTile | None = None,
    *,
    overlap: bool = True,
) -> None:
    """Attend with one token per slice and write `out`.

    q: [slices, query heads, head_dim], tokens may be further apart; pool: [2, blocks, block_tokens, key heads,
    head_dim]; block_tables: [slices, blocks] int32; lens: [slices] int32, where 0 leaves the slice's rows of `out` as
    they are; out: [slices, query heads * head_dim]. Without `overlap` no program starts before the kernel before it is
    done.
    """
    num_slices, num_heads, head_dim = q.shape
    _, _, block_tokens, num_kv_heads, _ = pool.shape
    assert q.stride(1) == head_dim and q.stride(2) == 1
    assert pool.is_contiguous() and out.is_contiguous() and block_tables.stride(1) == 1
    if num_slices == 0:
        return
    if isinstance(splits, ChosenSplits):
        chosen, count, min_tokens = splits.numbers, 0, 0
        grid = (num_kv_heads, splits.most_parts, 1)
    else:
        chosen, count, min_tokens = lens, splits.count, splits.min_tokens
        grid = (num_kv_heads, num_slices, count)
    assert count == 1 or workspace.fits(splits.num_parts(num_slices), layer)
    tile = tile or decode_tile(layer, pool.dtype)
    group = num_heads // num_kv_heads
    heads, dims = power_of_2(group), power_of_2(head_dim)
    launcher(_decode_kernel, grid)(
        q,
        pool,
        block_tables,
        lens,
        out,
        workspace.outputs,
        workspace.log_sums,
        workspace.arrivals,
        chosen,
        layer.scale,
        layer.softcap or 1.0,
        layer.window or NO_WINDOW,
        num_slices,
        q.stride(0),
        block_tables.stride(0),
        pool.stride(0),
        count,
        min_tokens,
        GROUP=group,
        KEY_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_TOKENS=block_tokens,
        SOFTCAP=layer.softcap is not None,
        ROWS=max(heads, _MIN_ROWS),
        HEADS=heads,
        DIMS=dims,
        TILE=tile.tokens,
        PARTS=max(4096 // (heads * dims), 1),
        PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
        WARM=power_of_2(max(head_dim * pool.itemsize // _LINE_BYTES, 1)) if count >= _WARMED_SPLITS else 0,
        CHOSEN=isinstance(splits, ChosenSplits),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **(overlap_options(q) if overlap else {"OVERLAP": False}),
    )
