"""The gated product of a feed-forward layer on Hopper, for many rows: act(x @ gate.T) * (x @ up.T) in one kernel.

What the library's product would write, two numbers for each that is needed, never goes to memory. One program stays on
each multiprocessor. One of its warps copies tiles to shared memory with the tensor copy engine, ahead of two groups of
four warps that take half of a tile's rows each; a tile has as many columns of gates as of ups, so that a thread holds
both of a pair. Tiles of the last waves may be narrower, so that these are full. Written in Gluon, which has the
instructions that plain Triton hides. Knows tensors only.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators

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

from penstock.kernels.triton.hopper import num_multiprocessors
from penstock.kernels.triton.hopper_prefill import make_barriers
from penstock.kernels.triton.launch import launcher
from penstock.kernels.triton.sizes import ceil_divide

_ROWS = gl.constexpr(128)  # of a tile
_HALF = gl.constexpr(64)  # of them, for one group of warps
_COLUMNS = gl.constexpr(128)  # of a tile's output: as many gates and as many ups
_PIECE = gl.constexpr(32)  # a narrow tile has three times as many columns: two products, of two pieces and of one
_NARROW = gl.constexpr(96)
_DEPTH = gl.constexpr(64)  # numbers of a row that one step multiplies: 128 bytes, as the products want them laid out
_STAGES = gl.constexpr(4)  # steps whose numbers are in shared memory
_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_PIECE_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2))
# Of a thread, at the start and by role; with 12 warps no more fit.
_REGISTERS, _PRODUCT_REGISTERS, _COPY_REGISTERS = 168, gl.constexpr(232), gl.constexpr(40)
_BAND = 16  # tiles below one another that are taken before the next column, so that weights are shared
# Up to so many rows the kernel pays if this part of its programs' time goes into rows and columns that are wanted.
_LEAST_USE = ((256, 0.84), (1024, 0.96), (1 << 30, 0.9))


@gluon.jit
def _place(tile, row_tiles, column_tiles, BAND: gl.constexpr):
    """Return the row and the column of a tile, in tiles: down a band, then along it."""
    band = tile // (BAND * column_tiles)
    height = gl.minimum(row_tiles - band * BAND, BAND)
    inside = tile - band * BAND * column_tiles
    return band * BAND + inside % height, inside // height


@gluon.jit
def _copy_partition(
    x_desc, weight_desc, piece_desc, x_buffer, weight_buffer, piece_buffer, ready, free,
    row_tiles, wide_columns, narrow_columns, size, depth, BAND: gl.constexpr,
):  # fmt: skip
    count = 0
    num_steps = depth // _DEPTH
    for tile in range(gl.program_id(0), row_tiles * wide_columns, gl.num_programs(0)):
        row, column = _place(tile, row_tiles, wide_columns, BAND)
        for step in range(num_steps):
            stage = count % _STAGES
            mbarrier.wait(free.index(stage), (count // _STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(stage), (_ROWS + 2 * _COLUMNS) * _DEPTH * 2)
            at = step * _DEPTH
            tma.async_copy_global_to_shared(x_desc, [row * _ROWS, at], ready.index(stage), x_buffer.index(stage))
            gates, ups = weight_buffer.index(2 * stage), weight_buffer.index(2 * stage + 1)
            tma.async_copy_global_to_shared(weight_desc, [column * _COLUMNS, at], ready.index(stage), gates)
            tma.async_copy_global_to_shared(weight_desc, [size + column * _COLUMNS, at], ready.index(stage), ups)
            count += 1
    for tile in range(gl.program_id(0), row_tiles * narrow_columns, gl.num_programs(0)):
        row, column = _place(tile, row_tiles, narrow_columns, BAND)
        first = wide_columns * _COLUMNS + column * _NARROW
        for step in range(num_steps):
            stage = count % _STAGES
            opened = ready.index(stage)
            mbarrier.wait(free.index(stage), (count // _STAGES & 1) ^ 1)
            mbarrier.expect(opened, (_ROWS + 2 * _NARROW) * _DEPTH * 2)
            at = step * _DEPTH
            tma.async_copy_global_to_shared(x_desc, [row * _ROWS, at], opened, x_buffer.index(stage))
            # Two pieces of gates, two of ups; then one of each.
            for piece in gl.static_range(2):
                gates, ups = piece_buffer.index(8 * stage + piece), piece_buffer.index(8 * stage + 2 + piece)
                tma.async_copy_global_to_shared(piece_desc, [first + piece * _PIECE, at], opened, gates)
                tma.async_copy_global_to_shared(piece_desc, [size + first + piece * _PIECE, at], opened, ups)
            gates, ups = piece_buffer.index(8 * stage + 4), piece_buffer.index(8 * stage + 5)
            tma.async_copy_global_to_shared(piece_desc, [first + 2 * _PIECE, at], opened, gates)
            tma.async_copy_global_to_shared(piece_desc, [size + first + 2 * _PIECE, at], opened, ups)
            count += 1


@gluon.jit
def _gate(gate, up, GELU: gl.constexpr):
    exponent = gate
    if GELU:
        # gelu's tanh form, x (1 + tanh z) / 2, is x sigmoid(2 z).
        exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    # Where exp overflows, the quotient is zero, as it should be.
    return gl.fdiv(gate * up, 1.0 + gl.exp2(exponent * -1.4426950408889634))


@gluon.jit
def _store(sums, out_buffer, out_desc, row, column, COLUMNS: gl.constexpr, GELU: gl.constexpr):
    """Gate a tile's columns, of which half are ups, and have them copied to memory."""
    gate, up = sums.reshape([_HALF, 2, COLUMNS]).permute([0, 2, 1]).split()
    out_buffer.store(_gate(gate, up, GELU).to(out_buffer.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, column], out_buffer)


@gluon.jit
def _product_partition(
    out_desc, pair_desc, piece_desc, x_buffer, weight_buffer, out_buffer, ready, free,
    row_tiles, wide_columns, narrow_columns, depth, WHICH: gl.constexpr, GELU: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """Multiply and gate one half of the rows of this program's tiles."""
    dtype: gl.constexpr = out_buffer.dtype
    count = 0
    num_steps = depth // _DEPTH
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * _COLUMNS.value, 16])
    for tile in range(gl.program_id(0), row_tiles * wide_columns, gl.num_programs(0)):
        row, column = _place(tile, row_tiles, wide_columns, BAND)
        sums = gl.zeros([_HALF, 2 * _COLUMNS], gl.float32, layout)
        for step in range(num_steps):
            stage = count % _STAGES
            mbarrier.wait(ready.index(stage), count // _STAGES & 1)
            token = warpgroup_mma(
                x_buffer.index(2 * stage + WHICH), weight_buffer.index(stage).permute((1, 0)), sums, is_async=True
            )
            sums = warpgroup_mma_wait(1, deps=[token])
            # One product later than its own: that one is surely done.
            mbarrier.arrive(free.index((count + _STAGES - 1) % _STAGES), count=1, pred=step > 0)
            count += 1
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(free.index((count + _STAGES - 1) % _STAGES), count=1)
        tma.store_wait(0)  # of the tile before
        _store(sums, out_buffer.index(WHICH), out_desc, row * _ROWS + WHICH * _HALF, column * _COLUMNS, _COLUMNS, GELU)

    # The same memory as the narrow tiles use it.
    pairs = weight_buffer._reinterpret(dtype, [2 * _STAGES, 4 * _PIECE, _DEPTH], _LAYOUT)
    pieces = weight_buffer._reinterpret(dtype, [4 * _STAGES, 2 * _PIECE, _DEPTH], _LAYOUT)
    pair_out = out_buffer._reinterpret(dtype, [4, _HALF, 2 * _PIECE], _LAYOUT).index(2 * WHICH)
    piece_out = out_buffer._reinterpret(dtype, [8, _HALF, _PIECE], _PIECE_LAYOUT).index(4 * WHICH + 2)
    pair_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 4 * _PIECE.value, 16])
    piece_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * _PIECE.value, 16])
    for tile in range(gl.program_id(0), row_tiles * narrow_columns, gl.num_programs(0)):
        row, column = _place(tile, row_tiles, narrow_columns, BAND)
        first = wide_columns * _COLUMNS + column * _NARROW
        pair_sums = gl.zeros([_HALF, 4 * _PIECE], gl.float32, pair_layout)
        piece_sums = gl.zeros([_HALF, 2 * _PIECE], gl.float32, piece_layout)
        for step in range(num_steps):
            stage = count % _STAGES
            mbarrier.wait(ready.index(stage), count // _STAGES & 1)
            x = x_buffer.index(2 * stage + WHICH)
            one = warpgroup_mma(x, pairs.index(2 * stage).permute((1, 0)), pair_sums, is_async=True)
            other = warpgroup_mma(x, pieces.index(4 * stage + 2).permute((1, 0)), piece_sums, is_async=True)
            pair_sums, piece_sums = warpgroup_mma_wait(2, deps=[one, other])
            mbarrier.arrive(free.index((count + _STAGES - 1) % _STAGES), count=1, pred=step > 0)
            count += 1
        pair_sums, piece_sums = warpgroup_mma_wait(0, deps=[pair_sums, piece_sums])
        mbarrier.arrive(free.index((count + _STAGES - 1) % _STAGES), count=1)
        tma.store_wait(0)
        begin = row * _ROWS + WHICH * _HALF
        _store(pair_sums, pair_out, pair_desc, begin, first, 2 * _PIECE, GELU)
        _store(piece_sums, piece_out, piece_desc, begin, first + 2 * _PIECE, _PIECE, GELU)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "wide_columns", "narrow_columns"])
def _hopper_gated_kernel(
    x_desc,  # [rows, depth]
    weight_desc,  # [2 * size, depth], gates first
    weight_piece_desc,
    out_desc,  # [rows, size]
    out_pair_desc,
    out_piece_desc,
    num_rows,
    wide_columns,  # of tiles
    narrow_columns,
    size,
    depth,
    GELU: gl.constexpr,
    BAND: gl.constexpr,
):
    dtype: gl.constexpr = x_desc.dtype
    layout: gl.constexpr = _LAYOUT
    x_buffer = gl.allocate_shared_memory(dtype, [_STAGES, _ROWS, _DEPTH], layout)
    weight_buffer = gl.allocate_shared_memory(dtype, [_STAGES, 2 * _COLUMNS, _DEPTH], layout)
    out_buffer = gl.allocate_shared_memory(dtype, [2, _HALF, _COLUMNS], layout)
    # The same memory by halves: rows of each group of warps, and gates and ups; and by pieces of a narrow tile.
    x_halves = x_buffer._reinterpret(dtype, [2 * _STAGES, _HALF, _DEPTH], layout)
    weight_halves = weight_buffer._reinterpret(dtype, [2 * _STAGES, _COLUMNS, _DEPTH], layout)
    weight_pieces = weight_buffer._reinterpret(dtype, [8 * _STAGES, _PIECE, _DEPTH], layout)
    ready, free = make_barriers(_STAGES, 1), make_barriers(_STAGES, 2)
    row_tiles = gl.cdiv(num_rows, _ROWS)
    gl.warp_specialize(
        [
            (_product_partition, (out_desc, out_pair_desc, out_piece_desc, x_halves, weight_buffer, out_buffer,
                                  ready, free, row_tiles, wide_columns, narrow_columns, depth, 0, GELU, BAND)),
            (_product_partition, (out_desc, out_pair_desc, out_piece_desc, x_halves, weight_buffer, out_buffer,
                                  ready, free, row_tiles, wide_columns, narrow_columns, depth, 1, GELU, BAND)),
            (_copy_partition, (x_desc, weight_desc, weight_piece_desc, x_buffer, weight_halves, weight_pieces,
                               ready, free, row_tiles, wide_columns, narrow_columns, size, depth, BAND)),
        ],
        [4, 1],
        [_PRODUCT_REGISTERS, _COPY_REGISTERS],
    )  # fmt: skip


def fits(weight: Tensor) -> bool:
    """Whether the kernel is made for such a weight: [2 * size, depth], gates first."""
    size, depth = weight.shape[0] // 2, weight.shape[1]
    return (
        weight.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and size % _COLUMNS.value == 0
        and depth % _DEPTH.value == 0
    )


def pays(num_rows: int, weight: Tensor) -> bool:
    """Whether the kernel is faster than a library's product and a gate, as far as was measured."""
    size = weight.shape[0] // 2
    programs = num_multiprocessors(weight.device)
    waves = _num_waves(num_rows, size, programs, columns_of_tiles(num_rows, size, programs))
    wanted: float = num_rows / _ROWS.value * size / _COLUMNS.value
    return wanted >= next(least for rows, least in _LEAST_USE if num_rows <= rows) * waves * programs


def columns_of_tiles(num_rows: int, size: int, programs: int) -> tuple[int, int]:
    """Return how many columns of wide and of narrow tiles end first, run by so many programs."""
    row_tiles, all_wide = ceil_divide(num_rows, _ROWS.value), size // _COLUMNS.value
    choices = [(all_wide, 0)]
    for wide_waves in range(ceil_divide(row_tiles * all_wide, programs)):
        wide = min(wide_waves * programs // row_tiles, all_wide)
        choices.append((wide, ceil_divide(size - wide * _COLUMNS.value, _NARROW.value)))
    return min(choices, key=lambda columns: _num_waves(num_rows, size, programs, columns))


def _num_waves(num_rows: int, size: int, programs: int, columns: tuple[int, int]) -> float:
    """How long these columns take, in times of a wide tile."""
    row_tiles = ceil_divide(num_rows, _ROWS.value)
    wide, narrow = (ceil_divide(row_tiles * count, programs) for count in columns)
    narrow_part: float = _NARROW.value / _COLUMNS.value
    return wide + narrow * narrow_part


def gated_product(x: Tensor, weight: Tensor, *, gelu: bool) -> Tensor:
    """Return act(gates) * ups of x @ weight.T. x: [rows, depth]; weight: [2 * size, depth] -> [rows, size]."""
    num_rows, depth = x.shape
    size = weight.shape[0] // 2
    assert x.stride(1) == 1 and fits(weight)
    out = x.new_empty(num_rows, size)
    if num_rows == 0:
        return out
    programs = num_multiprocessors(x.device)
    wide, narrow = columns_of_tiles(num_rows, size, programs)
    programs = min(programs, max(wide, narrow) * ceil_divide(num_rows, _ROWS.value))

    def described(matrix: Tensor, rows: int, columns: int, layout: gl.NVMMASharedLayout) -> TensorDescriptor:
        return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [rows, columns], layout)

    layout, depth_step, half, piece = _LAYOUT.value, _DEPTH.value, _HALF.value, _PIECE.value
    launcher(_hopper_gated_kernel, (programs,))(
        described(x, _ROWS.value, depth_step, layout),
        described(weight, _COLUMNS.value, depth_step, layout),
        described(weight, piece, depth_step, layout),
        described(out, half, _COLUMNS.value, layout),
        described(out, half, 2 * piece, layout),
        described(out, half, piece, _PIECE_LAYOUT.value),
        num_rows,
        wide,
        narrow,
        size,
        depth,
        GELU=gelu,
        BAND=_BAND,
        num_warps=4,
        maxnreg=_REGISTERS,
    )
    return out
