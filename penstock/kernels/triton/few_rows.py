"""Matrix products with a handful of rows on CUDA: weights streamed from memory at the speed memory has.

A program multiplies all rows of x with a band of the weight's rows, over the whole of their length or one part of it;
where a band has several parts, the program that ends last adds them up in order, so that the same inputs give the same
bits. Knows tensors only.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.overlap import overlap_options, wait_for_inputs

# The narrowest tensor-core tile: fewer rows are padded to this many.
MAX_ROWS = 16
_MAX_BANDS = 8192


@dataclass(frozen=True, slots=True)
class Band:
    """The shape of one program's work."""

    rows: int  # of the weight
    depth: int  # numbers of each row read at a time
    parts: int  # programs that share a band
    num_warps: int
    num_stages: int


@triton.jit
def _warm_cache(at):
    """Ask for the line that each pointer is in, without waiting for it."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
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
        _warm_cache(weight_ptr + column[:, None] * DEPTH + lines)
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
        tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=filled)
        tl.store(arrivals_ptr + band, 0)


@dataclass(slots=True)
class FewRowsWorkspace:
    """Room for the parts of one product at a time. `arrivals` is zero between launches: whoever adds up resets it."""

    parts: Tensor  # float32
    arrivals: Tensor  # int32

    @classmethod
    def of(cls, width: int, band: Band, device: torch.device) -> "FewRowsWorkspace":
        num_bands = width // band.rows
        return cls(
            torch.empty(num_bands * band.parts * MAX_ROWS * band.rows, dtype=torch.float32, device=device),
            torch.zeros(num_bands, dtype=torch.int32, device=device),
        )


def multiply(x: Tensor, weight: Tensor, band: Band, workspace: FewRowsWorkspace, warm: int = 8) -> Tensor:
    """Return x @ weight.T. x: [rows, depth], at most MAX_ROWS; weight: [width, depth], whole bands and tiles."""
    num_rows, depth = x.shape
    width = len(weight)
    assert num_rows <= MAX_ROWS and x.is_contiguous() and weight.is_contiguous()
    assert width % band.rows == 0 and depth % (band.parts * band.depth) == 0
    out = x.new_empty(num_rows, width)
    _few_rows_kernel[(width // band.rows, band.parts)](
        x,
        weight,
        out,
        workspace.parts,
        workspace.arrivals,
        num_rows,
        width,
        DEPTH=depth,
        ROWS=MAX_ROWS,
        BAND=band.rows,
        TILE=band.depth,
        PARTS=band.parts,
        WARM=warm,
        num_warps=band.num_warps,
        num_stages=band.num_stages,
        **overlap_options(x),
    )
    return out
