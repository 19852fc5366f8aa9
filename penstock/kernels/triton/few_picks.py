"""Sparse feed-forward layers for a handful of tokens on CUDA: three launches from the residual stream to the update.

`score_experts` adds the pending update to the stream, norms it and scores every expert; `gated_product` and `product`
multiply with the picked experts' matrices. There is no list of picks between them: each program picks the token's
experts again from the scores, exactly as `experts.route` does, which costs less than a launch. Tokens that share an
expert read it twice, so this is for few tokens. Products are multiply-adds in float32, bound by memory. Knows tensors
only.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.launch import launcher
from penstock.kernels.triton.overlap import overlap_options, wait_for_inputs, warm_cache
from penstock.kernels.triton.sizes import power_of_2

# More picks than this in a step share so many experts that reading each expert once pays for listing them.
MAX_PICKS = 32
# Divides every size that `experts.fits`.
_LEAST_DEPTH = 128


@dataclass(frozen=True, slots=True)
class PickTile:
    """The shape of one program's work."""

    columns: int
    depth: int
    num_warps: int
    num_stages: int


GATED_TILE = PickTile(columns=2, depth=512, num_warps=1, num_stages=5)
DOWN_TILE = PickTile(columns=8, depth=128, num_warps=8, num_stages=3)


@dataclass(frozen=True, slots=True)
class Routing:
    """How many experts a token picks of how many, and whether their weights sum to one."""

    num_experts: int
    num_active: int
    normalise: bool


@triton.jit
def _score_kernel(
    stream_ptr,  # [tokens, SIZE]
    norm_ptr,  # [SIZE] float32
    router_ptr,  # [experts, SIZE]
    x_ptr,  # [tokens, SIZE]
    logits_ptr,  # [tokens, experts]
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program for each token and expert: all norm the token's row, and each writes a part of it."""
    expert = tl.program_id(0)
    num_experts = tl.num_programs(0)
    token = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    # The weights wait for nobody.
    norm = tl.load(norm_ptr + column, mask=inside, other=0.0)
    router = tl.load(router_ptr + expert * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    at = token * SIZE + column
    x = tl.load(stream_ptr + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    kept = (x * scale * norm).to(x_ptr.dtype.element_ty)
    logit = tl.sum(kept.to(tl.float32) * router, axis=0)
    tl.store(logits_ptr + token * num_experts + expert, logit.to(logits_ptr.dtype.element_ty))
    tl.store(x_ptr + at, kept, mask=inside & (column * num_experts // SIZE == expert))


def score_experts(stream: Tensor, norm: Tensor, eps: float, router: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm of the residual stream, [tokens, size], and the experts' logits, [tokens, experts].

    stream: [tokens, size]; norm: [size] float32; router: [experts, size].
    """
    num_tokens, size = stream.shape
    num_experts = len(router)
    assert stream.is_contiguous() and router.is_contiguous()
    x = torch.empty_like(stream)
    logits = stream.new_empty(num_tokens, num_experts)
    if num_tokens:
        launcher(_score_kernel, (num_experts, num_tokens))(
            stream,
            norm,
            router,
            x,
            logits,
            eps,
            SIZE=size,
            BLOCK=power_of_2(size),
            num_warps=4,
            **overlap_options(stream),
        )
    return x, logits


@triton.jit
def _pick(
    logits_ptr,
    EXPERTS: tl.constexpr,
    ACTIVE: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Return the weights and numbers of one token's experts, [SLOTS] each, as `experts.route` does.

    A 16-bit logit and its expert make one integer, higher where the logit is, and among equals where the expert is
    lower: so a pick is one reduction of integers.
    """
    expert = tl.arange(0, BLOCK)
    inside = expert < EXPERTS
    # Read past the first-level cache, which may hold an earlier step's where nobody has waited yet.
    logits = tl.load(logits_ptr + expert, mask=inside, other=float("-inf"), cache_modifier=".cg")
    numbers = logits.to(tl.float32) + 0.0  # one zero, not two
    bits = numbers.to(logits.dtype).to(tl.int16, bitcast=True).to(tl.int32)
    left = (bits ^ ((bits >> 15) & 0x7FFF)) * 65536 + (65535 - expert)
    least: tl.constexpr = -(1 << 31)
    left = tl.where(inside, left, least)
    slot = tl.arange(0, SLOTS)
    taken = tl.full([SLOTS], least, tl.int32)
    for number in tl.static_range(ACTIVE):
        best = tl.max(left, axis=0)
        taken = tl.where(slot == number, best, taken)
        left = tl.where(left == best, least, left)
    picks = tl.where(slot < ACTIVE, 65535 - (taken & 65535), 0)
    bits = taken >> 16
    best_logits = (bits ^ ((bits >> 15) & 0x7FFF)).to(tl.int16).to(logits.dtype, bitcast=True).to(tl.float32)
    highest = tl.max(numbers, axis=0)
    weights = tl.where(slot < ACTIVE, tl.exp(best_logits - highest), 0.0)
    shares = weights if NORMALISE else tl.where(inside, tl.exp(numbers - highest), 0.0)
    return weights / tl.sum(shares, axis=0), picks


@triton.jit
def _gated_kernel(
    x_ptr,  # [tokens, DEPTH]
    logits_ptr,  # [tokens, EXPERTS]
    weight_ptr,  # [EXPERTS, 2 * width, DEPTH]
    out_ptr,  # [tokens, ACTIVE, width] float32
    width,
    DEPTH: tl.constexpr,
    GELU: tl.constexpr,
    EXPERTS: tl.constexpr,
    ACTIVE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program takes some columns of one pick."""
    wait_for_inputs(OVERLAP)
    token = tl.program_id(1).to(tl.int64)
    number = tl.program_id(2)
    _, picks = _pick(logits_ptr + token * EXPERTS, EXPERTS, ACTIVE, True, BLOCK, SLOTS)
    expert = tl.sum(tl.where(tl.arange(0, SLOTS) == number, picks, 0), axis=0).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, TILE)
    gate_at = weight_ptr + expert * (2 * width * DEPTH) + column[:, None] * DEPTH + inner[None, :]
    up_at = gate_at + width * DEPTH
    x_ptr += token * DEPTH
    gates = tl.zeros([COLUMNS, TILE], tl.float32)
    ups = tl.zeros([COLUMNS, TILE], tl.float32)
    for start in tl.range(0, DEPTH, TILE, num_stages=STAGES):
        x = tl.load(x_ptr + start + inner).to(tl.float32)[None, :]
        gates += tl.load(gate_at + start).to(tl.float32) * x
        ups += tl.load(up_at + start).to(tl.float32) * x
    gate = tl.sum(gates, axis=1)
    exponent = gate
    if GELU:
        exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    active = gate / (1.0 + tl.exp(-exponent)) * tl.sum(ups, axis=1)
    tl.store(out_ptr + (token * ACTIVE + number) * width + column, active)


def gated_product(
    x: Tensor,
    logits: Tensor,
    gate_up: Tensor,
    routing: Routing,
    *,
    gelu: bool,
    tile: PickTile = GATED_TILE,
) -> Tensor:
    """Return each pick's activation(gate) * up, float32 [tokens, active, width].

    x: [tokens, depth]; logits: [tokens, experts] of 16 bits; gate_up: [experts, 2 * width, depth], gates first.
    """
    num_tokens, depth = x.shape
    width = gate_up.shape[1] // 2
    tile_depth = tile.depth if depth % tile.depth == 0 else _LEAST_DEPTH
    assert x.is_contiguous() and gate_up.is_contiguous() and logits.dtype.itemsize == 2
    assert width % tile.columns == 0 and depth % tile_depth == 0
    out = torch.empty(num_tokens, routing.num_active, width, dtype=torch.float32, device=x.device)
    if num_tokens:
        launcher(_gated_kernel, (width // tile.columns, num_tokens, routing.num_active))(
            x,
            logits,
            gate_up,
            out,
            width,
            DEPTH=depth,
            GELU=gelu,
            EXPERTS=routing.num_experts,
            ACTIVE=routing.num_active,
            BLOCK=power_of_2(routing.num_experts),
            SLOTS=power_of_2(routing.num_active),
            COLUMNS=tile.columns,
            TILE=tile_depth,
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
            **overlap_options(x),
        )
    return out


@triton.jit
def _product_kernel(
    x_ptr,  # [tokens, ACTIVE, DEPTH] float32
    logits_ptr,  # [tokens, EXPERTS]
    weight_ptr,  # [EXPERTS, width, DEPTH]
    stream_ptr,  # [tokens, width]
    width,
    DEPTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    ACTIVE: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    WARM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program takes some columns of all picks of one token."""
    token = tl.program_id(1).to(tl.int64)
    # The logits are older than the launch before this one, which let this one start only once they were there.
    shares, picks = _pick(logits_ptr + token * EXPERTS, EXPERTS, ACTIVE, NORMALISE, BLOCK, SLOTS)
    number = tl.arange(0, SLOTS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row_at = weight_ptr + (picks.to(tl.int64) * width)[:, None] * DEPTH + column[None, :] * DEPTH  # [SLOTS, COLUMNS]
    if OVERLAP and WARM:
        lines = tl.arange(0, WARM)[None, None, :] * 64
        warm_cache(row_at[:, :, None] + tl.minimum(lines, DEPTH - 64))
    wait_for_inputs(OVERLAP)
    inner = tl.arange(0, TILE)[None, None, :]
    there = (number < ACTIVE)[:, None, None]
    weight_at = row_at[:, :, None] + inner
    x_at = x_ptr + token * (ACTIVE * DEPTH) + number[:, None, None] * DEPTH + inner
    total = tl.zeros([SLOTS, COLUMNS, TILE], tl.float32)
    for start in tl.range(0, DEPTH, TILE, num_stages=STAGES):
        # Weighed here and not at the end: the last sums are then of sums alone, which every lane adds up alike.
        x = tl.load(x_at + start, mask=there, other=0.0) * shares[:, None, None]
        total += tl.load(weight_at + start).to(tl.float32) * x
    at = stream_ptr + token * width + column
    kept = tl.load(at).to(tl.float32) + tl.sum(tl.sum(total, axis=2), axis=0)
    tl.store(at, kept.to(stream_ptr.dtype.element_ty))


def add_product(
    x: Tensor,
    logits: Tensor,
    down: Tensor,
    routing: Routing,
    stream: Tensor,
    *,
    tile: PickTile = DOWN_TILE,
    warm_lines: int = 4,
) -> None:
    """Add to the stream the sum of each token's picks times their experts' matrices and weights.

    x: [tokens, active, depth] float32, of `gated_product`, whose launch must be the one before; logits:
    [tokens, experts]; down: [experts, width, depth]; stream: [tokens, width].
    """
    num_tokens, _, depth = x.shape
    width = down.shape[1]
    assert x.is_contiguous() and down.is_contiguous() and stream.is_contiguous()
    assert width % tile.columns == 0 and depth % tile.depth == 0
    if num_tokens:
        launcher(_product_kernel, (width // tile.columns, num_tokens))(
            x,
            logits,
            down,
            stream,
            width,
            DEPTH=depth,
            EXPERTS=routing.num_experts,
            ACTIVE=routing.num_active,
            NORMALISE=routing.normalise,
            BLOCK=power_of_2(routing.num_experts),
            SLOTS=power_of_2(routing.num_active),
            COLUMNS=tile.columns,
            TILE=tile.depth,
            STAGES=tile.num_stages,
            WARM=warm_lines,
            num_warps=tile.num_warps,
            **overlap_options(x),
        )
