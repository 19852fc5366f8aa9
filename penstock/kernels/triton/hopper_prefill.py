"""Paged causal attention of many query tokens per slice on Hopper: copies, products and exponentials side by side.

One program stays on each multiprocessor and takes tiles from the same list as `paged_prefill`. One of its warps copies
queries, and keys and values by blocks, to shared memory with the tensor copy engine, ahead of two groups of four warps
that take half of the tile's rows each: while the products of one run, the other weighs its scores. A tile is some query
heads of one key-value head by as many tokens as make 128 rows. Written in Gluon, which has the instructions that plain
Triton hides. Knows tensors, blocks and lengths.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators

import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from penstock.kernels.attention.interface import LayerAttention
from penstock.kernels.triton.hopper import num_multiprocessors
from penstock.kernels.triton.launch import launcher
from penstock.kernels.triton.paged_prefill import NO_TILE

TILE_ROWS = 128
_ROWS = gl.constexpr(TILE_ROWS)
_HALF = gl.constexpr(64)  # of them, for one group of warps
_KEYS = gl.constexpr(128)  # read in one step
_STAGES = gl.constexpr(2)  # steps whose keys and values are in shared memory
_COPY_ROWS = gl.constexpr(16)  # keys or values that one copy brings: a block, or part of one
_COPY_WIDTH = gl.constexpr(64)  # numbers of a head that one copy brings: 128 bytes, as the products want them laid out
_COPY_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_END = gl.constexpr(NO_TILE)
# Of a thread, at the start and by role; with 12 warps no more fit.
_REGISTERS, _PRODUCT_REGISTERS, _COPY_REGISTERS = 168, gl.constexpr(232), gl.constexpr(40)
_MAX_HEADS = 8  # of a tile, so that a copy of queries has whole groups of 8 rows


def fits(layer: LayerAttention, pool: Tensor) -> bool:
    """Whether the kernel is made for such a layer and pool."""
    return (
        pool.dtype in (torch.bfloat16, torch.float16)
        and layer.head_dim in (64, 128)
        and pool.shape[2] % _COPY_ROWS.value == 0
        and layer.window is None
        and layer.softcap is None
    )


def tile_tokens(layer: LayerAttention) -> int:
    # As many heads of a group as divide it evenly: a tile short in tokens suits short slices.
    group = layer.num_heads // layer.num_kv_heads
    tokens: int = _ROWS.value // min(group & -group, _MAX_HEADS)
    return tokens


@gluon.jit
def _read_item(tiles_ptr, wave, num_tiles, HEAD_TILES: gl.constexpr):
    """Return the slice, the first token and the heads of a program's tile: there and back over all programs, so that
    each gets an equal share of a list that is sorted by work."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    item = wave * programs + gl.where(wave % 2 == 0, program, programs - 1 - program)
    tile = item // HEAD_TILES
    inside = tile < num_tiles
    piece = gl.load(tiles_ptr + 2 * tile, mask=inside, other=_END)
    first = gl.load(tiles_ptr + 2 * tile + 1, mask=inside, other=0)
    return piece, first, item % HEAD_TILES


@gluon.jit
def _copy_queries(q_desc, buffer, ready, token, head, slot, HEAD_DIM: gl.constexpr, TOKENS: gl.constexpr):
    COPY: gl.constexpr = q_desc.block_type.shape[0]
    COPIES: gl.constexpr = _HALF // COPY
    PARTS: gl.constexpr = HEAD_DIM // _COPY_WIDTH
    mbarrier.expect(ready, _ROWS * HEAD_DIM * 2)
    for half in gl.static_range(2):
        for part in gl.static_range(PARTS):
            for copy in gl.static_range(COPIES):
                row = half * _HALF + copy * COPY
                column = (head + row // TOKENS) * HEAD_DIM + part * _COPY_WIDTH
                into = buffer.index(((slot * 2 + half) * PARTS + part) * COPIES + copy)
                tma.async_copy_global_to_shared(q_desc, [token + row % TOKENS, column], ready, into)


@gluon.jit
def _copy_blocks(desc, buffer, ready, rows, column, stage, HEAD_DIM: gl.constexpr):
    BLOCKS: gl.constexpr = len(rows)
    PARTS: gl.constexpr = HEAD_DIM // _COPY_WIDTH
    mbarrier.expect(ready, _KEYS * HEAD_DIM * 2)
    for part in gl.static_range(PARTS):
        for block in gl.static_range(BLOCKS):
            into = buffer.index((stage * PARTS + part) * BLOCKS + block)
            tma.async_copy_global_to_shared(desc, [rows[block], column + part * _COPY_WIDTH], ready, into)


@gluon.jit
def _clear_values(buffer, stage, num_valid, HEAD_DIM: gl.constexpr):
    """Make zeros of the rest of a slice's last block: what stands there may not be a number, which would spread."""
    BLOCKS: gl.constexpr = _KEYS // _COPY_ROWS
    PARTS: gl.constexpr = HEAD_DIM // _COPY_WIDTH
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    row = gl.arange(0, _COPY_ROWS, gl.SliceLayout(1, layout))
    for part in gl.static_range(PARTS):
        block = buffer.index((stage * PARTS + part) * BLOCKS + num_valid // _COPY_ROWS)
        values = block.load(layout)
        block.store(gl.where((row < num_valid % _COPY_ROWS)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()


@gluon.jit
def _block_rows(table_ptr, key, context, BLOCK_TOKENS: gl.constexpr):
    """Return where in the pool each copy's keys begin: past the context before it all, where copies find zeros."""
    rows = ()
    for copy in gl.static_range(_KEYS // _COPY_ROWS):
        at = key + copy * _COPY_ROWS
        block = gl.load(table_ptr + at // BLOCK_TOKENS, mask=at < context, other=0)
        rows += (gl.where(at < context, block * BLOCK_TOKENS + at % BLOCK_TOKENS, -_COPY_ROWS),)  # type: ignore[assignment]
    return rows


@gluon.jit
def _copy_partition(
    descs, buffers, barriers, lists, num_tiles, table_stride,
    GROUP: gl.constexpr, HEAD_TILES: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_TOKENS: gl.constexpr,
    TOKENS: gl.constexpr,
):  # fmt: skip
    """Bring what the tiles of this program need, the last keys of each first, as soon as there is room."""
    q_desc, k_desc, v_desc = descs
    q_buffer, k_buffer, v_buffer = buffers
    q_ready, q_free, k_ready, k_free, v_ready, v_free, tail_ready, _ = barriers
    tiles_ptr, starts_ptr, lens_ptr, tables_ptr = lists
    wave = 0  # tiles so far
    num_read = 0  # of them, those with queries
    count = 0  # steps so far
    num_tails = 0
    piece, first, head_tile = _read_item(tiles_ptr, wave, num_tiles, HEAD_TILES)
    while piece != _END:
        wave += 1
        next_piece, next_first, next_head_tile = _read_item(tiles_ptr, wave, num_tiles, HEAD_TILES)
        if piece >= 0:
            begin = gl.load(starts_ptr + piece)
            num_queries = gl.load(starts_ptr + piece + 1) - begin
            context = gl.load(lens_ptr + piece)
            num_steps = gl.cdiv(context - num_queries + gl.minimum(first + TOKENS, num_queries), _KEYS)
            table_ptr = tables_ptr + piece.to(gl.int64) * table_stride
            head = head_tile * (_ROWS // TOKENS)
            column = head // GROUP * HEAD_DIM
            slot = num_read % 2
            mbarrier.wait(q_free.index(slot), (num_read // 2 & 1) ^ 1)
            _copy_queries(q_desc, q_buffer, q_ready.index(slot), begin + first, head, slot, HEAD_DIM, TOKENS)
            num_read += 1
            for step in range(num_steps):
                key = (num_steps - 1 - step) * _KEYS
                rows = _block_rows(table_ptr, key, context, BLOCK_TOKENS)
                stage = count % _STAGES
                phase = (count // _STAGES & 1) ^ 1
                mbarrier.wait(k_free.index(stage), phase)
                _copy_blocks(k_desc, k_buffer, k_ready.index(stage), rows, column, stage, HEAD_DIM)
                mbarrier.wait(v_free.index(stage), phase)
                num_valid = context - key
                if (num_valid < _KEYS) & (num_valid % _COPY_ROWS != 0):
                    _copy_blocks(v_desc, v_buffer, tail_ready.index(0), rows, column, stage, HEAD_DIM)
                    mbarrier.wait(tail_ready.index(0), num_tails & 1)
                    num_tails += 1
                    _clear_values(v_buffer, stage, num_valid, HEAD_DIM)
                    mbarrier.arrive(v_ready.index(stage), count=1)
                else:
                    _copy_blocks(v_desc, v_buffer, v_ready.index(stage), rows, column, stage, HEAD_DIM)
                count += 1
        piece, first, head_tile = next_piece, next_first, next_head_tile


@gluon.jit
def _fold(numbers):
    """Return the larger of each column of the first half and its fellow of the second."""
    WIDTH: gl.constexpr = numbers.type.shape[1] // 2
    low, high = numbers.reshape([_HALF, 2, WIDTH]).permute([0, 2, 1]).split()
    return gl.maximum(low, high)


@gluon.jit
def _row_maximum(scores):
    # A thread compares its own numbers in one chain, which takes as long as the chain is: folding shortens it.
    highest = gl.max(_fold(_fold(scores)), axis=1)
    return gl.convert_layout(highest, gl.SliceLayout(1, scores.type.layout), assert_trivial=True)


@gluon.jit
def _pack(weights, dtype: gl.constexpr):
    """Round to pairs in one register each. As single numbers they would be taken apart and joined in every step."""
    even, odd = weights.reshape([_HALF, _KEYS // 2, 2]).split()
    rounding: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(rounding, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpack(packed, dtype: gl.constexpr, layout: gl.constexpr):
    """Return the weights as the left side of a product."""
    even = (packed & 0xFFFF).to(gl.int16).to(dtype, bitcast=True)
    odd = (packed >> 16).to(gl.int16).to(dtype, bitcast=True)
    weights = gl.join(even, odd).reshape([_HALF, _KEYS])
    return gl.convert_layout(weights, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon.jit
def _weigh(scores, highest, sums, position, key, sharpness, MASKED: gl.constexpr):
    """Return weights, what older sums shrink by, the new highest score and the new sums."""
    if MASKED:
        keys = key + gl.arange(0, _KEYS, gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(position[:, None] >= keys[None, :], scores, float("-inf"))
    higher = gl.maximum(highest, _row_maximum(scores) * sharpness)
    # A row may have seen nothing yet.
    level = gl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    shrink = gl.exp2(highest - level)
    weights = gl.exp2(scores * sharpness - level[:, None])
    return weights, shrink, higher, sums * shrink + gl.sum(weights, axis=1)


@gluon.jit
def _start_scores(q, k_buffer, turns, count, WHICH: gl.constexpr, layout: gl.constexpr):
    """Issue the product of queries and a step's keys when it is this group's turn."""
    mbarrier.wait(turns.index(WHICH), (count & 1) ^ (1 - WHICH))
    keys = k_buffer.index(count % _STAGES).permute((1, 0))
    nothing = gl.zeros([_HALF, _KEYS], gl.float32, layout)
    return warpgroup_mma(q, keys, nothing, use_acc=False, is_async=True)


@gluon.jit
def _attend_steps(
    state, q, buffers, barriers, position, begin, end, num_steps, count, sharpness,
    MASKED: gl.constexpr, WHICH: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Go on with the online softmax, last keys first: the scores of one step beside the values of the one before."""
    output, weights, highest, sums = state
    _q, k_buffer, v_buffer = buffers
    _q_ready, _q_free, k_ready, k_free, v_ready, v_free, _tail, turns = barriers
    dtype: gl.constexpr = k_buffer.dtype
    for step in range(begin, end):
        # Taken apart before any product is under way: what feeds one must not change until all are done.
        left = _unpack(weights, dtype, layout)
        scores_token = _start_scores(q, k_buffer, turns, count, WHICH, layout)
        before = count - 1
        stage = before % _STAGES
        mbarrier.wait(v_ready.index(stage), before // _STAGES & 1)
        output_token = warpgroup_mma(left, v_buffer.index(stage), output, is_async=True)
        mbarrier.arrive(turns.index(1 - WHICH), count=1)
        scores = warpgroup_mma_wait(1, deps=[scores_token])
        mbarrier.arrive(k_free.index(count % _STAGES), count=1)
        key = (num_steps - 1 - step) * _KEYS
        exact, shrink, highest, sums = _weigh(scores, highest, sums, position, key, sharpness, MASKED)
        # Waiting here for the next keys also keeps the compiler from waiting for the output before all is weighed.
        count += 1
        mbarrier.wait(k_ready.index(count % _STAGES), count // _STAGES & 1, pred=step + 1 < num_steps)
        output, weights = warpgroup_mma_wait(0, deps=[output_token, weights])
        mbarrier.arrive(v_free.index(stage), count=1)
        output = output * gl.convert_layout(shrink, gl.SliceLayout(1, output.type.layout))[:, None]
        weights = _pack(exact, dtype)  # in the registers that the product has just left
    return (output, weights, highest, sums), count


@gluon.jit
def _attend_tile(q, buffers, barriers, position_first, num_valid, count, sharpness,
                 WHICH: gl.constexpr, HEAD_DIM: gl.constexpr, TOKENS: gl.constexpr):  # fmt: skip
    """Return the output of a group's rows and the number of steps so far."""
    _q, k_buffer, v_buffer = buffers
    _q_ready, _q_free, k_ready, k_free, v_ready, v_free, _tail, turns = barriers
    dtype: gl.constexpr = k_buffer.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _KEYS.value, 16])
    output_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    num_steps = gl.cdiv(position_first + num_valid, _KEYS)
    # Every row sees all keys up to the tile's first token: whole steps of those need no mask.
    num_masked = gl.maximum(num_steps - (position_first + 1) // _KEYS, 1)
    row = WHICH * _HALF + gl.arange(0, _HALF, gl.SliceLayout(1, layout))
    position = position_first + row % TOKENS
    highest = gl.full([_HALF], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    sums = gl.zeros([_HALF], gl.float32, gl.SliceLayout(1, layout))
    mbarrier.wait(k_ready.index(count % _STAGES), count // _STAGES & 1)
    scores_token = _start_scores(q, k_buffer, turns, count, WHICH, layout)
    mbarrier.arrive(turns.index(1 - WHICH), count=1)
    scores = warpgroup_mma_wait(0, deps=[scores_token])
    mbarrier.arrive(k_free.index(count % _STAGES), count=1)
    key = (num_steps - 1) * _KEYS
    weights, _shrink, highest, sums = _weigh(scores, highest, sums, position, key, sharpness, True)
    count += 1
    mbarrier.wait(k_ready.index(count % _STAGES), count // _STAGES & 1, pred=num_steps > 1)
    state = (gl.zeros([_HALF, HEAD_DIM], gl.float32, output_layout), _pack(weights, dtype), highest, sums)
    state, count = _attend_steps(
        state, q, buffers, barriers, position, 1, num_masked, num_steps, count, sharpness, True, WHICH, layout
    )
    state, count = _attend_steps(
        state, q, buffers, barriers, position, num_masked, num_steps, num_steps, count, sharpness, False, WHICH, layout
    )
    output, weights, highest, sums = state
    last = count - 1
    mbarrier.wait(v_ready.index(last % _STAGES), last // _STAGES & 1)
    left = _unpack(weights, dtype, layout)
    output_token = warpgroup_mma(left, v_buffer.index(last % _STAGES), output, is_async=True)
    output, weights = warpgroup_mma_wait(0, deps=[output_token, weights])
    mbarrier.arrive(v_free.index(last % _STAGES), count=1)
    output = output / gl.convert_layout(sums, gl.SliceLayout(1, output_layout))[:, None]
    return output.to(dtype), count


@gluon.jit
def _store_rows(out_ptr, values, token, num_valid, head,
                WHICH: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, TOKENS: gl.constexpr):  # fmt: skip
    """Write a group's rows where their token is one of the valid ones."""
    layout: gl.constexpr = values.type.layout
    row = WHICH * _HALF + gl.arange(0, _HALF, gl.SliceLayout(1, layout))
    dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    at = (token + row % TOKENS).to(gl.int64) * (HEADS * HEAD_DIM) + (head + row // TOKENS) * HEAD_DIM
    filled = (row % TOKENS < num_valid)[:, None] & (dim < HEAD_DIM)[None, :]
    gl.store(out_ptr + at[:, None] + dim[None, :], values, mask=filled)


@gluon.jit
def _product_partition(shared, WHICH: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, TOKENS: gl.constexpr):
    """Attend with one half of the rows of this program's tiles."""
    out_ptr, buffers, barriers, lists, num_tiles, num_tokens, sharpness = shared
    q_buffer = buffers[0]
    q_ready, q_free = barriers[0], barriers[1]
    tiles_ptr, starts_ptr, lens_ptr, _tables_ptr = lists
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    HEAD_TILES: gl.constexpr = HEADS * TOKENS // _ROWS
    wave = 0
    num_read = 0
    count = 0
    piece, first, head_tile = _read_item(tiles_ptr, wave, num_tiles, HEAD_TILES)
    while piece != _END:
        wave += 1
        next_piece, next_first, next_head_tile = _read_item(tiles_ptr, wave, num_tiles, HEAD_TILES)
        head = head_tile * (_ROWS // TOKENS)
        if piece >= 0:
            begin = gl.load(starts_ptr + piece)
            num_queries = gl.load(starts_ptr + piece + 1) - begin
            position_first = gl.load(lens_ptr + piece) - num_queries + first
            num_valid = gl.minimum(num_queries - first, TOKENS)
            slot = num_read % 2
            q = q_buffer.index(slot * 2 + WHICH)
            mbarrier.wait(q_ready.index(slot), num_read // 2 & 1)
            output, count = _attend_tile(
                q, buffers, barriers, position_first, num_valid, count, sharpness, WHICH, HEAD_DIM, TOKENS
            )
            # Nobody reads these queries again: their place turns the output into whole rows.
            q.store(output)
            values = q.load(store_layout)
            fence_async_shared()
            mbarrier.arrive(q_free.index(slot), count=1)
            num_read += 1
            _store_rows(out_ptr, values, begin + first, num_valid, head, WHICH, HEADS, HEAD_DIM, TOKENS)
        else:  # rows that are nobody's
            nothing = gl.zeros([_HALF, HEAD_DIM], q_buffer.dtype, store_layout)
            _store_rows(out_ptr, nothing, first, num_tokens - first, head, WHICH, HEADS, HEAD_DIM, TOKENS)
        piece, first, head_tile = next_piece, next_first, next_head_tile


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Return so many barriers, each of which opens after so many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(index), count=ARRIVALS)
    return barriers


@gluon.jit(
    do_not_specialize=["num_tiles", "num_tokens", "table_stride"],
    do_not_specialize_on_alignment=["lens_ptr", "starts_ptr", "tables_ptr", "tiles_ptr"],
)
def _hopper_prefill_kernel(
    q_desc,  # [tokens, query heads * head_dim]
    k_desc,  # [slots, key heads * head_dim]
    v_desc,
    out_ptr,  # [tokens, query heads * head_dim]
    tables_ptr,  # [slices, blocks] int32
    lens_ptr,  # [slices] int32
    starts_ptr,  # [slices + 1] int32
    tiles_ptr,  # [tiles, 2] int32
    num_tiles,
    num_tokens,
    table_stride,
    sharpness,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr,
    TOKENS: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    layout: gl.constexpr = _COPY_LAYOUT
    PARTS: gl.constexpr = HEAD_DIM // _COPY_WIDTH
    COPY: gl.constexpr = q_desc.block_type.shape[0]
    COPIES: gl.constexpr = _STAGES * PARTS * (_KEYS // _COPY_ROWS)
    q_buffer = gl.allocate_shared_memory(dtype, [4, _HALF, HEAD_DIM], layout)
    k_buffer = gl.allocate_shared_memory(dtype, [_STAGES, _KEYS, HEAD_DIM], layout)
    v_buffer = gl.allocate_shared_memory(dtype, [_STAGES, _KEYS, HEAD_DIM], layout)
    # The same memory as the copies see it: rows of 128 bytes, those of a head's first part before the others.
    q_copies = q_buffer._reinterpret(dtype, [4 * PARTS * (_HALF // COPY), COPY, _COPY_WIDTH], layout)
    k_copies = k_buffer._reinterpret(dtype, [COPIES, _COPY_ROWS, _COPY_WIDTH], layout)
    v_copies = v_buffer._reinterpret(dtype, [COPIES, _COPY_ROWS, _COPY_WIDTH], layout)
    buffers, copies = (q_buffer, k_buffer, v_buffer), (q_copies, k_copies, v_copies)
    # What is ready is announced by its copies, what is free by both groups; queries have two places.
    barriers = (
        make_barriers(2, 1), make_barriers(2, 2),
        make_barriers(_STAGES, 1), make_barriers(_STAGES, 2),
        make_barriers(_STAGES, 1), make_barriers(_STAGES, 2),
        make_barriers(1, 1), make_barriers(2, 1),
    )  # fmt: skip
    lists = (tiles_ptr, starts_ptr, lens_ptr, tables_ptr)
    HEAD_TILES: gl.constexpr = HEADS * TOKENS // _ROWS
    shared = (out_ptr, buffers, barriers, lists, num_tiles, num_tokens, sharpness)
    gl.warp_specialize(
        [
            (_product_partition, (shared, 0, HEADS, HEAD_DIM, TOKENS)),
            (_product_partition, (shared, 1, HEADS, HEAD_DIM, TOKENS)),
            (_copy_partition, ((q_desc, k_desc, v_desc), copies, barriers, lists, num_tiles, table_stride,
                               GROUP, HEAD_TILES, HEAD_DIM, BLOCK_TOKENS, TOKENS)),
        ],
        [4, 1],
        [_PRODUCT_REGISTERS, _COPY_REGISTERS],
    )  # fmt: skip


def hopper_prefill(
    q: Tensor,
    pool: Tensor,
    block_tables: Tensor,
    lens: Tensor,
    starts: Tensor,
    tiles: Tensor,
    out: Tensor,
    layer: LayerAttention,
) -> None:
    """Attend with the listed tiles of query tokens and write their rows of `out`. The arguments are `paged_prefill`'s.

    `tiles` must be listed for `tile_tokens` of this layer, and end with the first entry that is none.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, num_blocks, block_tokens, num_kv_heads, _ = pool.shape
    assert q.stride(1) == head_dim and q.stride(2) == 1
    assert pool.is_contiguous() and out.is_contiguous() and block_tables.stride(1) == 1 and tiles.is_contiguous()
    num_tiles = tiles.shape[0]
    if num_tiles == 0:
        return
    tokens = tile_tokens(layer)
    copy_rows, copy_width, layout = _COPY_ROWS.value, _COPY_WIDTH.value, _COPY_LAYOUT.value
    slots, width = num_blocks * block_tokens, num_kv_heads * head_dim
    keys, values = (
        TensorDescriptor(half, [slots, width], [width, 1], [copy_rows, copy_width], layout) for half in pool.unbind()
    )
    queries = TensorDescriptor(
        q, [num_tokens, num_heads * head_dim], [q.stride(0), 1], [min(tokens, _HALF.value), copy_width], layout
    )
    # Fewer where tokens cannot fill a tile for each: those without one would keep others' from their multiprocessors.
    num_items = min(num_tiles, num_tokens // tokens + 1) * num_heads * tokens // _ROWS.value
    launcher(_hopper_prefill_kernel, (min(num_multiprocessors(q.device), num_items),))(
        queries,
        keys,
        values,
        out,
        block_tables,
        lens,
        starts,
        tiles,
        num_tiles,
        num_tokens,
        block_tables.stride(0),
        layer.scale * math.log2(math.e),
        GROUP=num_heads // num_kv_heads,
        HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_TOKENS=block_tokens,
        TOKENS=tokens,
        num_warps=4,
        maxnreg=_REGISTERS,
    )
