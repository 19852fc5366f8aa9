"""Sparse feed-forward layers on CUDA: each token's row is multiplied with the matrices of its own experts only.

Four launches, none of which waits for the host or depends on data in its shape, so that a step can be captured:
`route` picks experts, `group_picks` lists the picks expert by expert, `gated_product` and `product` multiply each list
with its expert's matrices, and `add_up` sums what a token's experts gave. A pick is one (token, expert) pair. Knows
tensors only.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.launch import launcher
from penstock.kernels.triton.overlap import overlap_options, wait_for_inputs
from penstock.kernels.triton.sizes import ceil_divide, power_of_2

_SCAN = 1024


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """The shape of one step of a program's work."""

    picks: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


def expert_tile(num_picks: int, num_experts: int, *, gated: bool) -> ExpertTile:
    """Narrow tiles where each expert has a few picks and weights are all that is read, wide ones for prompts.

    An expert's picks should mostly fit one tile, or its weights are read twice.
    """
    if num_picks <= 8 * num_experts:
        return ExpertTile(picks=16, columns=32, depth=128, num_warps=2 if gated else 1, num_stages=5)
    if num_picks <= 24 * num_experts:
        return ExpertTile(picks=32, columns=32, depth=128, num_warps=2, num_stages=4)
    return ExpertTile(picks=64, columns=64 if gated else 128, depth=64, num_warps=4, num_stages=4)


@dataclass(frozen=True, slots=True)
class Groups:
    """Picks in the order of their experts."""

    picks: Tensor  # [picks] int32: each pick's expert
    order: Tensor  # [picks] int32: which pick
    starts: Tensor  # [experts + 1] int32: where each expert's picks begin


@triton.jit
def _route_kernel(
    logits_ptr,  # [tokens, EXPERTS]
    weights_ptr,  # [tokens, ACTIVE] float32
    picks_ptr,  # [tokens, ACTIVE] int32
    EXPERTS: tl.constexpr,
    ACTIVE: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + token * EXPERTS + expert, mask=expert < EXPERTS, other=float("-inf")).to(tl.float32)
    highest = tl.max(logits, axis=0)
    shares = tl.where(expert < EXPERTS, tl.exp(logits - highest), 0.0)
    total = tl.sum(shares, axis=0)
    slot = tl.arange(0, SLOTS)
    weights = tl.zeros([SLOTS], tl.float32)
    picks = tl.zeros([SLOTS], tl.int32)
    left = tl.where(expert < EXPERTS, logits, float("-inf"))
    for number in tl.static_range(ACTIVE):
        best, pick = tl.max(left, axis=0, return_indices=True)
        weights = tl.where(slot == number, tl.exp(best - highest), weights)
        picks = tl.where(slot == number, pick, picks)
        left = tl.where(expert == pick, float("-inf"), left)
    weights = weights / (tl.sum(weights, axis=0) if NORMALISE else total)
    at = token * ACTIVE + slot
    tl.store(weights_ptr + at, weights, mask=slot < ACTIVE)
    tl.store(picks_ptr + at, picks, mask=slot < ACTIVE)


def route(logits: Tensor, num_active: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """Return the weights, float32, and numbers, int32, of each token's experts, both [tokens, num_active].

    logits: [tokens, experts]. Weights are shares of the softmax over all experts, or over the picked ones.
    """
    num_tokens, num_experts = logits.shape
    assert logits.is_contiguous()
    weights = torch.empty(num_tokens, num_active, dtype=torch.float32, device=logits.device)
    picks = torch.empty(num_tokens, num_active, dtype=torch.int32, device=logits.device)
    if num_tokens:
        launcher(_route_kernel, (num_tokens,))(
            logits,
            weights,
            picks,
            EXPERTS=num_experts,
            ACTIVE=num_active,
            NORMALISE=normalise,
            BLOCK=power_of_2(num_experts),
            SLOTS=power_of_2(num_active),
            num_warps=1,
            **overlap_options(logits),
        )
    return weights, picks


@triton.jit(do_not_specialize=["num_picks"])
def _group_kernel(
    picks_ptr,  # [picks] int32
    order_ptr,  # [picks] int32
    starts_ptr,  # [experts + 1] int32
    num_picks,
    SCAN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program for each expert: count the picks of experts before it, then list its own behind them."""
    wait_for_inputs(OVERLAP)
    expert = tl.program_id(0)
    before = tl.zeros([SCAN], tl.int32)
    for start in range(0, num_picks, SCAN):
        pick = start + tl.arange(0, SCAN)
        chosen = tl.load(picks_ptr + pick, mask=pick < num_picks, other=expert)
        before += (chosen < expert).to(tl.int32)
    end = tl.sum(before, axis=0)
    tl.store(starts_ptr + expert, end)
    for start in range(0, num_picks, SCAN):
        pick = start + tl.arange(0, SCAN)
        own = (tl.load(picks_ptr + pick, mask=pick < num_picks, other=-1) == expert).to(tl.int32)
        tl.store(order_ptr + end + tl.cumsum(own, axis=0) - 1, pick, mask=own > 0)
        end += tl.sum(own, axis=0)
    # The last expert's end is the end of all.
    tl.store(starts_ptr + expert + 1, end, mask=expert == tl.num_programs(0) - 1)


def group_picks(picks: Tensor, num_experts: int) -> Groups:
    """picks: [tokens, active] int32."""
    order = torch.empty(picks.numel(), dtype=torch.int32, device=picks.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=picks.device)
    launcher(_group_kernel, (num_experts,))(
        picks, order, starts, picks.numel(), SCAN=_SCAN, num_warps=4, **overlap_options(picks)
    )
    return Groups(picks.view(-1), order, starts)


@triton.jit
def _expert_kernel(
    x_ptr,  # GATED: [tokens, DEPTH], else [picks in order, DEPTH]
    weight_ptr,  # GATED: [experts, 2 * width, DEPTH], else [experts, width, DEPTH]
    shares_ptr,  # [picks] float32
    picks_ptr,  # [picks] int32
    order_ptr,
    starts_ptr,
    out_ptr,  # GATED: [picks in order, width], else [picks, width]
    width,
    ACTIVE: tl.constexpr,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    FEW: tl.constexpr,
    PICKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program takes some columns of one expert and walks over the expert's picks."""
    wait_for_inputs(OVERLAP)
    slot = tl.program_id(1)
    expert = slot
    if FEW:
        # Fewer picks than experts: a program for each pick, and the first of an expert's works for all of them.
        expert = tl.load(picks_ptr + tl.load(order_ptr + slot))
    begin = tl.load(starts_ptr + expert)
    if FEW & (begin != slot):
        return
    end = tl.load(starts_ptr + expert + 1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, TILE)[None, :]
    rows: tl.constexpr = 2 if GATED else 1
    weight_ptr += expert.to(tl.int64) * (rows * width * DEPTH)
    weight_at = weight_ptr + column[:, None] * DEPTH + inner
    up_at = weight_at + width * DEPTH
    for first in range(begin, end, PICKS):
        place = first + tl.arange(0, PICKS)
        filled = place < end
        pick = tl.load(order_ptr + place, mask=filled, other=0)
        source = pick // ACTIVE if GATED else place
        x_at = x_ptr + source.to(tl.int64)[:, None] * DEPTH + inner
        total = tl.zeros([PICKS, COLUMNS], tl.float32)
        up_total = tl.zeros([PICKS, COLUMNS], tl.float32)
        for start in range(0, DEPTH, TILE):
            x = tl.load(x_at + start, mask=filled[:, None], other=0.0)
            total = tl.dot(x, tl.trans(tl.load(weight_at + start)), total)
            if GATED:
                up_total = tl.dot(x, tl.trans(tl.load(up_at + start)), up_total)
        if GATED:
            exponent = total
            if GELU:
                exponent = 1.5957691216057308 * (total + 0.044715 * total * total * total)
            total = total / (1.0 + tl.exp(-exponent)) * up_total
            target = place
        else:
            total = total * tl.load(shares_ptr + pick, mask=filled, other=0.0)[:, None]
            target = pick
        out_at = out_ptr + target.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=filled[:, None])


def gated_product(x: Tensor, gate_up: Tensor, groups: Groups, num_active: int, *, gelu: bool) -> Tensor:
    """Return each pick's activation(gate) * up, in the order of the groups: [picks, width].

    x: [tokens, depth]; gate_up: [experts, 2 * width, depth], gates first.
    """
    width = gate_up.shape[1] // 2
    out = x.new_empty(len(groups.order), width)
    tile = expert_tile(len(groups.order), len(gate_up), gated=True)
    _launch(x, gate_up, None, groups, out, num_active, tile, gelu=gelu)
    return out


def product(x: Tensor, down: Tensor, shares: Tensor, groups: Groups) -> Tensor:
    """Return each pick's row times its expert's matrix and its share, in the order of picks: [picks, width].

    x: [picks, depth] in the order of the groups; down: [experts, width, depth]; shares: float32, one for each pick.
    """
    out = x.new_empty(len(groups.order), down.shape[1])
    tile = expert_tile(len(groups.order), len(down), gated=False)
    _launch(x, down, shares, groups, out, 1, tile, gelu=False)
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    shares: Tensor | None,
    groups: Groups,
    out: Tensor,
    num_active: int,
    tile: ExpertTile,
    *,
    gelu: bool,
) -> None:
    num_experts, _, depth = weight.shape
    width = out.shape[1]
    assert x.is_contiguous() and weight.is_contiguous()
    assert width % tile.columns == 0 and depth % tile.depth == 0
    num_picks = len(groups.order)
    launcher(_expert_kernel, (width // tile.columns, min(num_picks, num_experts)))(
        x,
        weight,
        groups.starts if shares is None else shares,
        groups.picks,
        groups.order,
        groups.starts,
        out,
        width,
        ACTIVE=num_active,
        DEPTH=depth,
        GATED=shares is None,
        GELU=gelu,
        FEW=num_picks < num_experts,
        PICKS=tile.picks,
        COLUMNS=tile.columns,
        TILE=tile.depth,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **overlap_options(x),
    )


def fits(hidden: int, intermediate: int) -> bool:
    """Whether every tile divides experts of this size."""
    return hidden % 128 == 0 and intermediate % 128 == 0


@triton.jit
def _add_up_kernel(
    parts_ptr, out_ptr, WIDTH: tl.constexpr, ACTIVE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(ACTIVE):
        at = parts_ptr + (token * ACTIVE + number) * WIDTH + column
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * WIDTH + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def add_up(parts: Tensor, num_active: int) -> Tensor:
    """Sum what each token's experts gave. parts: [tokens * num_active, width] -> [tokens, width]."""
    num_picks, width = parts.shape
    out = parts.new_empty(num_picks // num_active, width)
    if len(out):
        launcher(_add_up_kernel, (len(out), ceil_divide(width, 1024)))(
            parts, out, WIDTH=width, ACTIVE=num_active, BLOCK=1024, num_warps=4, **overlap_options(parts)
        )
    return out
