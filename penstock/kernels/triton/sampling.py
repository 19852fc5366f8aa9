"""Tokens from logits on CUDA: no sort, no host, one launch for a whole step.

Two kernels. `sample` serves rows that take the best token or draw from the whole distribution: one pass over the row,
cut into parts, of which the program that ends last takes the best. `sample_filtered` also does top-k, min-p and top-p:
it closes in on the lowest logit that stays by counting, a few passes over the row. Both give each token the noise that
`kernels.sampling.noise` gives it, so that they draw what that module draws, up to rounding. Never hears of a request.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from penstock.kernels.triton.launch import launcher
from penstock.kernels.triton.overlap import overlap_options, wait_for_inputs
from penstock.kernels.triton.sizes import ceil_divide, power_of_2

_BLOCK = 1024
_MAX_PARTS = 64
# Parts of all rows together that keep a large device's memory busy.
_WANTED_PARTS = 1024
_FILTER_BLOCK = 4096
_FILTER_WARPS = 16
# As in `kernels.sampling`.
_LEAST_TEMPERATURE = tl.constexpr(1e-5)


@dataclass(slots=True)
class SamplingWorkspace:
    """Room for the parts of one launch of `sample` at a time. `arrivals` is zero between launches."""

    numbers: Tensor  # [2, rows, parts] float32: each part's highest logit and highest score
    tokens: Tensor  # [rows, parts] int32: which token has the highest score
    arrivals: Tensor  # [rows] int32

    @classmethod
    def of(cls, max_rows: int, device: torch.device) -> "SamplingWorkspace":
        return cls(
            torch.empty(2, max_rows, _MAX_PARTS, dtype=torch.float32, device=device),
            torch.empty(max_rows, _MAX_PARTS, dtype=torch.int32, device=device),
            torch.zeros(max_rows, dtype=torch.int32, device=device),
        )


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _key(seed, position):
    """splitmix64 of (seed, position): what decides a draw."""
    mixed = _mix(seed.to(tl.uint64) + 0x9E3779B97F4A7C15)
    return _mix(mixed + position.to(tl.uint64) * 0x9E3779B97F4A7C15)


@triton.jit
def _log(x, FAST: tl.constexpr):
    """The library's logarithm is exact to the last bit and a dozen times the work of the device's own."""
    return libdevice.fast_logf(x) if FAST else tl.log(x)


@triton.jit
def _noise(key, token, FAST: tl.constexpr):
    """As `kernels.sampling.noise`."""
    mixed = token.to(tl.uint32) * 0x9E3779B1 + key.to(tl.uint32)
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B + (key >> 32).to(tl.uint32)
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35
    mixed = mixed ^ (mixed >> 16)
    # A float between one and two with these bits behind the point, less one, plus half a step.
    share = ((mixed >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 0.999999940395355224609375
    # Where the share is small the noise is large and must be right: there -log(1 - share) is a series.
    series = share * (1.0 + share * (0.5 + share * (0.3333333333333333 + share * 0.25)))
    return -_log(tl.where(share < 0.03125, series, -_log(1.0 - share, FAST)), FAST)


@triton.jit
def _read(row_ptr, column, inside):
    """Logits in float32. What is not a number reads as infinity: it wins, so that a broken row shows."""
    x = tl.load(row_ptr + column, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.where(x != x, float("inf"), x)  # noqa: PLR0124


@triton.jit
def _lowest_of_best(scores, tokens):
    """Return the highest score and its token, the lowest among equals."""
    best = tl.max(scores, axis=0)
    return best, tl.min(tl.where(scores == best, tokens, 2147483647), axis=0)


@triton.jit(
    do_not_specialize=["parts", "part_blocks", "capacity"],
    do_not_specialize_on_alignment=["temperatures_ptr", "seeds_ptr", "positions_ptr", "tokens_ptr", "best_ptr"],
)
def _sample_kernel(
    logits_ptr,  # [rows, vocab]
    temperatures_ptr,  # [rows] float32
    seeds_ptr,  # [rows] int64
    positions_ptr,  # [rows] int64
    tokens_ptr,  # [rows] int64
    best_ptr,  # [rows] float32
    part_numbers_ptr,
    part_tokens_ptr,
    arrivals_ptr,
    table_ptr,  # int32
    places_ptr,  # [rows] int64
    logits_stride,
    parts,
    part_blocks,  # of BLOCK tokens in a part
    capacity,  # rows of the workspace
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    FILE: tl.constexpr,
    FAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row_ptr = logits_ptr + row * logits_stride
    temperature = tl.load(temperatures_ptr + row)
    sharpness = 1.0 / tl.where(temperature > 0.0, tl.maximum(temperature, _LEAST_TEMPERATURE), 1.0)
    part_size = part_blocks * BLOCK
    begin = part * part_size
    end = tl.minimum(begin + part_size, VOCAB)

    key = _key(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    # Everything by lanes until the end: adding up across threads is what costs.
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    scores = tl.full([BLOCK], float("-inf"), tl.float32)
    tokens = begin + tl.arange(0, BLOCK)
    for start in range(begin, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = _read(row_ptr, column, column < end)
        highest = tl.maximum(highest, x)
        score = x * sharpness
        if temperature > 0.0:
            score += _noise(key, column, FAST)
        tokens = tl.where(score > scores, column, tokens)
        scores = tl.maximum(scores, score)
    score, token = _lowest_of_best(scores, tokens)

    place = row * PARTS + part
    tl.store(part_numbers_ptr + place, tl.max(highest, axis=0))
    tl.store(part_numbers_ptr + capacity * PARTS + place, score)
    tl.store(part_tokens_ptr + place, token)
    # Every thread's part must be written before the arrival is counted.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel", scope="gpu")
    if arrived == parts - 1:
        every = tl.arange(0, PARTS)
        there = every < parts
        places = row * PARTS + every
        # Written by other multiprocessors during this launch: read past the first-level cache.
        highs = tl.load(part_numbers_ptr + places, mask=there, other=float("-inf"), cache_modifier=".cg")
        score_at = part_numbers_ptr + capacity * PARTS + places
        part_scores = tl.load(score_at, mask=there, other=float("-inf"), cache_modifier=".cg")
        part_tokens = tl.load(part_tokens_ptr + places, mask=there, other=2147483647, cache_modifier=".cg")
        _, chosen = _lowest_of_best(part_scores, part_tokens)
        tl.store(best_ptr + row, tl.max(highs, axis=0))
        tl.store(tokens_ptr + row, chosen.to(tl.int64))
        if FILE:
            tl.store(table_ptr + tl.load(places_ptr + row), chosen.to(tl.int32))
        tl.store(arrivals_ptr + row, 0)


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Where drawn tokens are also written: entries `places` of a flat table."""

    tokens: Tensor  # int32
    places: Tensor  # [n] int64


def sample(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    workspace: SamplingWorkspace,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    table: TokenTable | None = None,
) -> tuple[Tensor, Tensor]:
    """Return each row's token, [n] int64, and its highest logit, [n] float32, not finite where a logit is not.

    A row of temperature zero takes its best token, the first among equals; others draw from the whole distribution.
    logits: [n, vocab] of any float dtype; temperatures: [n] float32; seeds, positions: [n] int64. `out` is filled and
    returned where it is given.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    if out is None:
        device = logits.device
        out = torch.empty(num_rows, dtype=torch.int64, device=device), torch.empty(num_rows, device=device)
    tokens, best = out
    if num_rows == 0:
        return out
    parts = min(max(_WANTED_PARTS // num_rows, 8), _MAX_PARTS)
    part_blocks = ceil_divide(ceil_divide(vocab_size, parts), _BLOCK)
    parts = ceil_divide(vocab_size, part_blocks * _BLOCK)
    launcher(_sample_kernel, (num_rows, parts))(
        logits,
        temperatures,
        seeds,
        positions,
        tokens,
        best,
        workspace.numbers,
        workspace.tokens,
        workspace.arrivals,
        None if table is None else table.tokens,
        None if table is None else table.places,
        logits.stride(0),
        parts,
        part_blocks,
        workspace.arrivals.numel(),
        VOCAB=vocab_size,
        PARTS=_MAX_PARTS,
        BLOCK=_BLOCK,
        FILE=table is not None,
        FAST=logits.is_cuda,
        num_warps=4,
        **overlap_options(logits),
    )
    return out


@triton.jit
def _count(row_ptr, highest, sharpness, first, second, third, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many tokens reach each of three levels, and the weight they hold together.

    A level is (logit - highest) / temperature, so at most zero.
    """
    counts_1 = tl.zeros([BLOCK], tl.int32)
    counts_2 = tl.zeros([BLOCK], tl.int32)
    counts_3 = tl.zeros([BLOCK], tl.int32)
    sums_1 = tl.zeros([BLOCK], tl.float32)
    sums_2 = tl.zeros([BLOCK], tl.float32)
    sums_3 = tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCAB, BLOCK):
        column = start + tl.arange(0, BLOCK)
        level = (_read(row_ptr, column, column < VOCAB) - highest) * sharpness
        weights = tl.exp(level)
        counts_1 += (level >= first).to(tl.int32)
        counts_2 += (level >= second).to(tl.int32)
        counts_3 += (level >= third).to(tl.int32)
        sums_1 += tl.where(level >= first, weights, 0.0)
        sums_2 += tl.where(level >= second, weights, 0.0)
        sums_3 += tl.where(level >= third, weights, 0.0)
    return (
        tl.sum(counts_1, axis=0),
        tl.sum(counts_2, axis=0),
        tl.sum(counts_3, axis=0),
        tl.sum(sums_1, axis=0),
        tl.sum(sums_2, axis=0),
        tl.sum(sums_3, axis=0),
    )


@triton.jit
def _narrow(
    row_ptr,
    highest,
    sharpness,
    low,
    high,
    wanted,
    BY_COUNT: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Close in on the highest level whose tokens hold at least `wanted` (tokens by count, or weight).

    Expects that the tokens that reach `low` hold it and those that reach `high` do not. Returns (low, high, what those
    that reach `high` hold, the edge): between low and high lies one token, or tokens so close that they count as equal,
    and the edge is the highest of them.
    """
    low_count = tl.full([], VOCAB, tl.int32)
    high_count = tl.zeros([], tl.int32)
    held = tl.zeros([], tl.float32)
    while (high - low > 1e-6) & (low_count - high_count > 1):
        width = high - low
        level_1, level_2, level_3 = low + 0.25 * width, low + 0.5 * width, low + 0.75 * width
        count_1, count_2, count_3, sum_1, sum_2, sum_3 = _count(
            row_ptr, highest, sharpness, level_1, level_2, level_3, VOCAB, BLOCK
        )
        if BY_COUNT:
            amount_1, amount_2, amount_3 = count_1.to(tl.float32), count_2.to(tl.float32), count_3.to(tl.float32)
        else:
            amount_1, amount_2, amount_3 = sum_1, sum_2, sum_3
        # From the lowest level up: the last that holds enough, and the first above it that does not.
        if amount_1 < wanted:
            high, high_count, held = level_1, count_1, amount_1
        elif amount_2 < wanted:
            low, low_count = level_1, count_1
            high, high_count, held = level_2, count_2, amount_2
        elif amount_3 < wanted:
            low, low_count = level_2, count_2
            high, high_count, held = level_3, count_3, amount_3
        else:
            low, low_count = level_3, count_3
    edges = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, VOCAB, BLOCK):
        column = start + tl.arange(0, BLOCK)
        level = (_read(row_ptr, column, column < VOCAB) - highest) * sharpness
        edges = tl.where(level < high, tl.maximum(edges, level), edges)
    return low, high, held, tl.max(edges, axis=0)


@triton.jit
def _equals_needed(missing, edge, VOCAB: tl.constexpr):
    """How many tokens at the level `edge` make up for a missing weight: at least the one that reaches it."""
    needed = tl.ceil(missing / tl.exp(edge))
    return tl.minimum(tl.maximum(needed, 1.0), VOCAB).to(tl.int32)


@triton.jit
def _draw_kept(
    row_ptr,
    highest,
    sharpness,
    low,
    high,
    num_between,
    key,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
):
    """Draw among the tokens that reach `high` and the first `num_between` of those that only reach `low`."""
    scores = tl.full([BLOCK], float("-inf"), tl.float32)
    tokens = tl.arange(0, BLOCK)
    passed = tl.zeros([], tl.int32)
    for start in range(0, VOCAB, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = _read(row_ptr, column, column < VOCAB)
        level = (x - highest) * sharpness
        between = ((level >= low) & (level < high)).to(tl.int32)
        kept = (level >= high) | ((between > 0) & (passed + tl.cumsum(between, axis=0) <= num_between))
        passed += tl.sum(between, axis=0)
        score = tl.where(kept, x * sharpness + _noise(key, column, FAST), float("-inf"))
        tokens = tl.where(score > scores, column, tokens)
        scores = tl.maximum(scores, score)
    return _lowest_of_best(scores, tokens)[1]


@triton.jit
def _filter_kernel(
    logits_ptr,  # [rows, vocab]
    temperatures_ptr,  # [rows] float32
    seeds_ptr,  # [rows] int64
    positions_ptr,  # [rows] int64
    top_k_ptr,  # [rows] int64
    top_p_ptr,  # [rows] float32
    min_p_ptr,  # [rows] float32
    tokens_ptr,  # [rows] int64
    best_ptr,  # [rows] float32
    logits_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    highest = tl.full([], float("-inf"), tl.float32)
    token = tl.zeros([], tl.int32)
    for start in range(0, VOCAB, BLOCK):
        column = start + tl.arange(0, BLOCK)
        tile_highest, tile_token = tl.max(_read(row_ptr, column, column < VOCAB), axis=0, return_indices=True)
        token = tl.where(tile_highest > highest, start + tile_token, token)
        highest = tl.maximum(highest, tile_highest)
    tl.store(best_ptr + row, highest)
    temperature = tl.load(temperatures_ptr + row)
    if (temperature > 0.0) & (tl.abs(highest) < float("inf")):
        sharpness = 1.0 / tl.maximum(temperature, _LEAST_TEMPERATURE)
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        # Below this level a float32 weight is zero, so it does not matter how many tokens are there.
        low = tl.full([], -110.0, tl.float32)
        high = low
        edge = low
        num_between = tl.zeros([], tl.int32)
        if (top_k > 0) & (top_k < VOCAB):
            reaching, _, _, _, _, _ = _count(row_ptr, highest, sharpness, low, low, low, VOCAB, BLOCK)
            if reaching > top_k:
                low, high, held, edge = _narrow(
                    row_ptr, highest, sharpness, low, low + 111.0, top_k.to(tl.float32), True, VOCAB, BLOCK
                )
                num_between = top_k.to(tl.int32) - held.to(tl.int32)
        if min_p > 0.0:
            floor = tl.log(min_p)
            if floor >= high:
                low, high, num_between = floor, floor, num_between * 0
        if top_p < 1.0:
            _, _, _, above, _, _ = _count(row_ptr, highest, sharpness, high, high, high, VOCAB, BLOCK)
            wanted = top_p * (above + num_between * tl.exp(edge))
            if wanted <= above:
                low, high, held, edge = _narrow(
                    row_ptr, highest, sharpness, high, high * 0.0 + 1.0, wanted, False, VOCAB, BLOCK
                )
                num_between = _equals_needed(wanted - held, edge, VOCAB)
            else:
                num_between = tl.minimum(_equals_needed(wanted - above, edge, VOCAB), num_between)
        key = _key(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
        token = _draw_kept(row_ptr, highest, sharpness, low, high, num_between, key, VOCAB, BLOCK, FAST)
    tl.store(tokens_ptr + row, token.to(tl.int64))


def sample_filtered(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> tuple[Tensor, Tensor]:
    """As `sample`, after top-k, then min-p, then top-p. top_k: [n] int64, 0 for no limit; top_p, min_p: [n] float32.

    Among tokens equally likely at the edge, the first of the vocabulary stay.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    best = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        launcher(_filter_kernel, (num_rows,))(
            logits,
            temperatures,
            seeds,
            positions,
            top_k,
            top_p,
            min_p,
            tokens,
            best,
            logits.stride(0),
            VOCAB=vocab_size,
            BLOCK=min(_FILTER_BLOCK, power_of_2(vocab_size)),
            FAST=logits.is_cuda,
            num_warps=_FILTER_WARPS,
        )
    return tokens, best
