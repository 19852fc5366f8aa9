"""A decoding step's inputs, gathered from tensors that persist between steps, in one launch.

Rows and positions in; out comes what the model, the attention and the draw need to know of each. Knows tensors only.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.sizes import ceil_divide

_BLOCK = 128


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Of one token for each row. [n] each."""

    token_ids: Tensor  # int32
    slots: Tensor  # int64: where the token's key and value go
    lens: Tensor  # int32: tokens visible to it, itself included
    next_positions: Tensor  # int64: of the token to be drawn
    places: Tensor  # int64: of the token to be drawn, in the flat table of tokens
    temperatures: Tensor  # float32
    seeds: Tensor  # int64

    @classmethod
    def of(cls, count: int, device: torch.device) -> "DecodeInputs":
        def room(dtype: torch.dtype) -> Tensor:
            return torch.empty(count, dtype=dtype, device=device)

        return cls(
            room(torch.int32), room(torch.int64), room(torch.int32), room(torch.int64), room(torch.int64),
            room(torch.float32), room(torch.int64),
        )  # fmt: skip


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["positions_ptr"])
def _gather_kernel(
    rows_ptr,  # [count] int64
    positions_ptr,  # [count] int64
    tokens_ptr,  # [rows, width] int32
    tables_ptr,  # [rows, blocks] int32
    row_temperatures_ptr,  # [rows] float32
    row_seeds_ptr,  # [rows] int64
    token_ids_ptr,
    slots_ptr,
    lens_ptr,
    next_positions_ptr,
    places_ptr,
    temperatures_ptr,
    seeds_ptr,
    count,
    width,
    num_blocks,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    row = tl.load(rows_ptr + index, mask=inside, other=0)
    position = tl.load(positions_ptr + index, mask=inside, other=0)
    place = row * width + position
    tl.store(token_ids_ptr + index, tl.load(tokens_ptr + place, mask=inside, other=0), mask=inside)
    block = tl.load(tables_ptr + row * num_blocks + position // BLOCK_TOKENS, mask=inside, other=0).to(tl.int64)
    tl.store(slots_ptr + index, block * BLOCK_TOKENS + position % BLOCK_TOKENS, mask=inside)
    tl.store(lens_ptr + index, (position + 1).to(tl.int32), mask=inside)
    tl.store(next_positions_ptr + index, position + 1, mask=inside)
    tl.store(places_ptr + index, place + 1, mask=inside)
    tl.store(temperatures_ptr + index, tl.load(row_temperatures_ptr + row, mask=inside, other=0.0), mask=inside)
    tl.store(seeds_ptr + index, tl.load(row_seeds_ptr + row, mask=inside, other=0), mask=inside)


def gather_decode_inputs(
    rows: Tensor,
    positions: Tensor,
    tokens: Tensor,
    tables: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    block_tokens: int,
) -> DecodeInputs:
    """rows, positions: [n] int64; tokens: [rows, width] int32; tables: [rows, blocks] int32; the rest: [rows]."""
    count = len(rows)
    found = DecodeInputs.of(count, rows.device)
    # Launched in a rehearsal too: torch looks tokens up by what it finds, and so do others find their places.
    _gather_kernel[(ceil_divide(count, _BLOCK),)](
        rows,
        positions,
        tokens,
        tables,
        temperatures,
        seeds,
        found.token_ids,
        found.slots,
        found.lens,
        found.next_positions,
        found.places,
        found.temperatures,
        found.seeds,
        count,
        tokens.shape[1],
        tables.shape[1],
        BLOCK_TOKENS=block_tokens,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return found
