"""The gated product of a feed-forward layer on Hopper, for many rows: act(x @ gate.T) * (x @ up.T) in one kernel.

What the library's product would write, two numbers for each that is needed, never goes to memory. One program stays on
each multiprocessor. One of its warps copies tiles to shared memory with the tensor copy engine, ahead of two groups of
four warps that take half of a tile's rows each; a tile has as many columns of gates as of ups, so that a thread holds
both of a pair. Written in Gluon, which has the instructions that plain Triton hides. Knows tensors only.
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
from penstock.kernels.triton.sizes import ceil_divide

_ROWS = gl.constexpr(128)  # of a tile
_HALF = gl.constexpr(64)  # of them, for one group of warps
_COLUMNS = gl.constexpr(128)  # of a tile's output: as many gates and as many ups
_DEPTH = gl.constexpr(64)  # numbers of a row that one step multiplies: 128 bytes, as the products want them laid out
_STAGES = gl.constexpr(4)  # steps whose numbers are in shared memory
_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
# Of a thread, at the start and by role; with 12 warps no more fit.
_REGISTERS, _PRODUCT_REGISTERS, _COPY_REGISTERS = 168, gl.constexpr(232), gl.constexpr(40)
_BAND = 16  # tiles below one another that are taken before the next column, so that weights are shared
_MANY_ROWS, _TWO_ROWS = 1024, (192, 256)
_FULL_WAVES = 0.93  # the share of all programs that have a tile in every wave, the last one included


@gluon.jit
def _place(tile, row_tiles, column_tiles, BAND: gl.constexpr):
    """Return the row and the column of a tile, in tiles: down a band, then along it."""
    band = tile // (BAND * column_tiles)
    height = gl.minimum(row_tiles - band * BAND, BAND)
    inside = tile - band * BAND * column_tiles
    return band * BAND + inside % height, inside // height


@gluon.jit
def _copy_partition(
    x_desc, weight_desc, x_buffer, weight_buffer, ready, free, row_tiles, column_tiles, size, depth, BAND: gl.constexpr
):  # fmt: skip
    count = 0
    num_steps = depth // _DEPTH
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row, column = _place(tile, row_tiles, column_tiles, BAND)
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


@gluon.jit
def _gate(gate, up, GELU: gl.constexpr):
    exponent = gate
    if GELU:
        # gelu's tanh form, x (1 + tanh z) / 2, is x sigmoid(2 z).
        exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    # Where exp overflows, the quotient is zero, as it should be.
    return gl.fdiv(gate * up, 1.0 + gl.exp2(exponent * -1.4426950408889634))


@gluon.jit
def _product_partition(
    out_desc, x_buffer, weight_buffer, out_buffer, ready, free, row_tiles, column_tiles, depth,
    WHICH: gl.constexpr, GELU: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """Multiply and gate one half of the rows of this program's tiles."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * _COLUMNS.value, 16])
    out = out_buffer.index(WHICH)
    count = 0
    num_steps = depth // _DEPTH
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row, column = _place(tile, row_tiles, column_tiles, BAND)
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
        gate, up = sums.reshape([_HALF, 2, _COLUMNS]).permute([0, 2, 1]).split()
        values = _gate(gate, up, GELU).to(out_buffer.dtype)
        tma.store_wait(0)  # of the tile before
        out.store(values)
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [row * _ROWS + WHICH * _HALF, column * _COLUMNS], out)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows"])
def _hopper_gated_kernel(
    x_desc,  # [rows, depth]
    weight_desc,  # [2 * size, depth], gates first
    out_desc,  # [rows, size]
    num_rows,
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
    # The same memory by halves: rows of each group of warps, and gates and ups.
    x_halves = x_buffer._reinterpret(dtype, [2 * _STAGES, _HALF, _DEPTH], layout)
    weight_halves = weight_buffer._reinterpret(dtype, [2 * _STAGES, _COLUMNS, _DEPTH], layout)
    ready, free = make_barriers(_STAGES, 1), make_barriers(_STAGES, 2)
    row_tiles, column_tiles = gl.cdiv(num_rows, _ROWS), size // _COLUMNS
    gl.warp_specialize(
        [
            (_product_partition, (out_desc, x_halves, weight_buffer, out_buffer, ready, free,
                                  row_tiles, column_tiles, depth, 0, GELU, BAND)),
            (_product_partition, (out_desc, x_halves, weight_buffer, out_buffer, ready, free,
                                  row_tiles, column_tiles, depth, 1, GELU, BAND)),
            (_copy_partition, (x_desc, weight_desc, x_buffer, weight_halves, ready, free,
                               row_tiles, column_tiles, size, depth, BAND)),
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
    """Whether the kernel is faster than a library's product and a gate, as far as was measured.

    With many rows that is where the last wave of tiles is nearly full. Two rows of tiles read each weight once.
    """
    num_tiles = _num_tiles(num_rows, weight.shape[0] // 2)
    programs = num_multiprocessors(weight.device)
    if num_rows > _MANY_ROWS:
        return num_tiles >= _FULL_WAVES * ceil_divide(num_tiles, programs) * programs
    return _TWO_ROWS[0] < num_rows <= _TWO_ROWS[1] and 2 * num_tiles >= 3 * programs


def _num_tiles(num_rows: int, size: int) -> int:
    tiles: int = ceil_divide(num_rows, _ROWS.value) * size // _COLUMNS.value
    return tiles


def gated_product(x: Tensor, weight: Tensor, *, gelu: bool) -> Tensor:
    """Return act(gates) * ups of x @ weight.T. x: [rows, depth]; weight: [2 * size, depth] -> [rows, size]."""
    num_rows, depth = x.shape
    size = weight.shape[0] // 2
    assert x.stride(1) == 1 and fits(weight)
    out = x.new_empty(num_rows, size)
    if num_rows:
        layout, step = _LAYOUT.value, _DEPTH.value
        inputs = TensorDescriptor(x, [num_rows, depth], [x.stride(0), 1], [_ROWS.value, step], layout)
        weights = TensorDescriptor(weight, [2 * size, depth], [depth, 1], [_COLUMNS.value, step], layout)
        outputs = TensorDescriptor(out, [num_rows, size], [size, 1], [_HALF.value, _COLUMNS.value], layout)
        programs = min(num_multiprocessors(x.device), _num_tiles(num_rows, size))
        _hopper_gated_kernel[(programs,)](
            inputs, weights, outputs, num_rows, size, depth, GELU=gelu, BAND=_BAND, num_warps=4, maxnreg=_REGISTERS
        )
    return out
