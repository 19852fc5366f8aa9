"""Matrix products with a handful of rows on CUDA: weights streamed from memory at the speed memory has.

A program multiplies all rows of x with a band of the weight's rows, over the whole of their length or one part of it;
where a band has several parts, the program that ends last adds them up in order, so that the same inputs give the same
bits. One row alone has a kernel of its own, which can also norm the row on its way in. Either can add its product to
what is there already. Knows tensors only.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.launch import launcher
from penstock.kernels.triton.overlap import overlap_options, wait_for_inputs, warm_cache

# The narrowest tensor-core tile: fewer rows are padded to this many.
MAX_ROWS = 16
# Programs that keep the memory of a large device busy: a narrow weight is cut along its depth until there are as many.
_WANTED_PROGRAMS = 192
_WIDE, _WIDEST = 16_384, 65_536
# Weights of so many rows and numbers are multiplied with one row by the kernel made for that: those that were measured.
_ROW_MIN_WIDTH, _ROW_MAX_NUMBERS = 1024, 12 << 20


@dataclass(frozen=True, slots=True)
class Band:
    """The shape of one program's work."""

    rows: int  # of the weight
    depth: int  # numbers of each row read at a time
    parts: int  # programs that share a band
    num_warps: int
    num_stages: int
    warm_lines: int = 0  # cache lines of each row asked for ahead of the inputs


@dataclass(frozen=True, slots=True)
class RowBand:
    """As `Band`, for the kernel of one row."""

    rows: int  # of the weight
    depth: int
    num_warps: int
    num_stages: int
    warm_lines: int = 0


@triton.jit
def _one_row_kernel(
    x_ptr,  # [DEPTH]
    weight_ptr,  # [width, DEPTH]
    norm_ptr,  # [DEPTH] float32
    out_ptr,  # [width]
    eps,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    WARM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Multiply-adds in float32 instead of tensor cores, which would work for 15 rows that are not there."""
    column = tl.program_id(0).to(tl.int64) * BAND + tl.arange(0, BAND)
    inner = tl.arange(0, TILE)
    weight_at = weight_ptr + column[:, None] * DEPTH + inner[None, :]
    if OVERLAP and WARM:
        warm_cache(weight_ptr + column[:, None] * DEPTH + tl.arange(0, WARM)[None, :] * 64)
    wait_for_inputs(OVERLAP)
    total = tl.zeros([BAND, TILE], tl.float32)
    squares = tl.zeros([TILE], tl.float32)
    for start in tl.range(0, DEPTH, TILE, num_stages=STAGES):
        x = tl.load(x_ptr + start + inner).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + start + inner)
        total += tl.load(weight_at + start).to(tl.float32) * x[None, :]
    result = tl.sum(total, axis=1)
    if NORM:
        # The row's scale is one number: it may wait until the end.
        result *= tl.rsqrt(tl.sum(squares, axis=0) / DEPTH + eps)
    if ADD:
        result += tl.load(out_ptr + column).to(tl.float32)
    tl.store(out_ptr + column, result.to(out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    x_ptr,  # [rows, DEPTH]
    weight_ptr,  # [width, DEPTH]
    out_ptr,  # [rows, width]
    parts_ptr,  # [bands, PARTS, ROWS, BAND] float32
    arrivals_ptr,  # [bands] int32
    num_rows,
    width,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    BAND: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    WARM: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    band = tl.program_id(0)
    part = tl.program_id(1)
    length: tl.constexpr = DEPTH // PARTS
    column = tl.arange(0, BAND)
    at = tl.arange(0, TILE)[None, :] + part * length
    weight_ptr += band.to(tl.int64) * (BAND * DEPTH)
    if OVERLAP and WARM:
        # The weights wait for nobody: while earlier kernels end, the first of them may already come to the cache.
        lines = tl.arange(0, WARM)[None, :] * 64 + part * length
        warm_cache(weight_ptr + column[:, None] * DEPTH + lines)
    wait_for_inputs(OVERLAP)
    row = tl.arange(0, ROWS)
    filled = (row < num_rows)[:, None]
    x_ptr += row[:, None] * DEPTH + at
    weight_ptr += column[:, None] * DEPTH + at
    total = tl.zeros([ROWS, BAND], tl.float32)
    for start in range(0, length, TILE):
        weight = tl.load(weight_ptr + start)  # [BAND, TILE]
        x = tl.load(x_ptr + start, mask=filled, other=0.0)  # [ROWS, TILE]
        total = tl.dot(x, tl.trans(weight), total)

    out_at = out_ptr + row[:, None] * width + band * BAND + column[None, :]
    if PARTS == 1:
        if ADD:
            total += tl.load(out_at, mask=filled, other=0.0).to(tl.float32)
        tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=filled)
        return
    inner = row[:, None] * BAND + column[None, :]
    parts_ptr += band.to(tl.int64) * (PARTS * ROWS * BAND)
    tl.store(parts_ptr + part * (ROWS * BAND) + inner, total, mask=filled)
    # Every thread's part must be written before the arrival is counted.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr + band, 1, sem="acq_rel", scope="gpu")
    if arrived == PARTS - 1:
        total = tl.zeros([ROWS, BAND], tl.float32)
        for other in tl.static_range(PARTS):
            # Written by other multiprocessors during this launch: read past the first-level cache.
            total += tl.load(parts_ptr + other * (ROWS * BAND) + inner, mask=filled, other=0.0, cache_modifier=".cg")
        if ADD:
            total += tl.load(out_at, mask=filled, other=0.0).to(tl.float32)
        tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=filled)
        tl.store(arrivals_ptr + band, 0)


def choose_band(width: int, depth: int) -> Band | None:
    """The shape that was fastest for weights of about this size, or None where no whole bands and tiles fit."""
    if _WIDE <= width < _WIDEST and width % 64 == 0 and depth % 128 == 0:
        return Band(rows=64, depth=128, parts=1, num_warps=4, num_stages=5, warm_lines=8)
    if depth % 256 or width % 32:
        return None
    if width // 32 >= _WANTED_PROGRAMS:
        return Band(rows=32, depth=256, parts=1, num_warps=2, num_stages=4)
    parts = 1
    while width // 16 * parts < _WANTED_PROGRAMS and parts < 8 and depth % (512 * parts) == 0:
        parts *= 2
    return Band(rows=16, depth=256, parts=parts, num_warps=1, num_stages=6 if parts == 1 else 4, warm_lines=8)


def choose_row_band(width: int, depth: int) -> RowBand | None:
    """As `choose_band`, for one row; None leaves it to the other kernel."""
    if width < _ROW_MIN_WIDTH or width * depth > _ROW_MAX_NUMBERS or width % 8 or depth % 512:
        return None
    if width // 8 >= 512:
        return RowBand(rows=8, depth=512, num_warps=4, num_stages=4)
    if depth % 1024:
        return RowBand(rows=4, depth=512, num_warps=1, num_stages=6)
    # Narrow ones follow attention, which leaves the memory idle: the first of their weights come meanwhile.
    return RowBand(rows=4, depth=1024, num_warps=2, num_stages=6, warm_lines=16)


class FewRowsProduct:
    """A weight with what its products need: one product at a time, in stream order."""

    def __init__(self, weight: Tensor, band: Band, row_band: RowBand | None = None) -> None:
        width, depth = weight.shape
        assert weight.is_contiguous() and width % band.rows == 0 and depth % (band.parts * band.depth) == 0
        assert row_band is None or (width % row_band.rows == 0 and depth % row_band.depth == 0)
        self._weight = weight
        self._band = band
        self._row_band = row_band
        num_bands = width // band.rows
        num_parts = num_bands * band.parts if band.parts > 1 else 0
        self._parts = torch.empty(num_parts * MAX_ROWS * band.rows, dtype=torch.float32, device=weight.device)
        # Zero between launches: whoever adds up resets it.
        self._arrivals = torch.zeros(num_bands, dtype=torch.int32, device=weight.device)

    def multiply(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return x @ weight.T in the given dtype, or x's. x: [rows, depth], at most MAX_ROWS -> [rows, width]."""
        out = x.new_empty(len(x), len(self._weight), dtype=dtype)
        self._launch(x, out, add=False)
        return out

    def add(self, x: Tensor, total: Tensor) -> None:
        """Add x @ weight.T to the total in place. x: [rows, depth], at most MAX_ROWS; total: [rows, width]."""
        assert total.is_contiguous()
        self._launch(x, total, add=True)

    def norms(self, num_rows: int) -> bool:
        """Whether `multiply_normed` takes so many rows."""
        return num_rows == 1 and self._row_band is not None

    def multiply_normed(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Return rms_norm(x, norm, eps) @ weight.T, the norm not rounded. norm: [depth] float32."""
        out = x.new_empty(len(x), len(self._weight))
        self._launch_row(x, out, norm, eps, add=False)
        return out

    def _launch_row(self, x: Tensor, out: Tensor, norm: Tensor | None, eps: float, *, add: bool) -> None:
        band = self._row_band
        width, depth = self._weight.shape
        assert band is not None and len(x) == 1 and x.is_contiguous()
        launcher(_one_row_kernel, (width // band.rows,))(
            x,
            self._weight,
            x if norm is None else norm,
            out,
            eps,
            DEPTH=depth,
            BAND=band.rows,
            TILE=band.depth,
            STAGES=band.num_stages,
            NORM=norm is not None,
            ADD=add,
            WARM=band.warm_lines,
            num_warps=band.num_warps,
            **overlap_options(x),
        )

    def _launch(self, x: Tensor, out: Tensor, *, add: bool) -> None:
        num_rows, band = len(x), self._band
        width, depth = self._weight.shape
        assert num_rows <= MAX_ROWS and x.is_contiguous()
        if num_rows == 1 and self._row_band is not None:
            self._launch_row(x, out, None, 0.0, add=add)
        elif num_rows:
            launcher(_few_rows_kernel, (width // band.rows, band.parts))(
                x,
                self._weight,
                out,
                self._parts,
                self._arrivals,
                num_rows,
                width,
                DEPTH=depth,
                ROWS=MAX_ROWS,
                BAND=band.rows,
                TILE=band.depth,
                PARTS=band.parts,
                WARM=band.warm_lines,
                ADD=add,
                num_warps=band.num_warps,
                num_stages=band.num_stages,
                **overlap_options(x),
            )


def product_for(weight: Tensor) -> FewRowsProduct | None:
    """Prepare products with a weight on a device where they were measured to be faster than the library's."""
    band = choose_band(*weight.shape)
    is_half = weight.dtype in (torch.bfloat16, torch.float16)
    if band is None or not is_half or torch.cuda.get_device_capability(weight.device) < (9, 0):
        return None
    return FewRowsProduct(weight, band, choose_row_band(*weight.shape))
