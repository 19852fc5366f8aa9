"""Paged attention for CPUs, on torch's fused attention kernel.

Slices of a few tokens (decoding, verifying guesses) are batched: their blocks are gathered with one copy and run in one
call, grouped by length so that padding stays below the work itself. Longer slices run one by one in tiles, each over
the keys that it can see. A context whose blocks follow one another in the pool is read in place.

Everything that does not depend on a layer's numbers is made once, in `prepare`. Knows nothing of requests. What lies
in the pool past a context's end is hidden by a bias and so must be finite: a pool starts as zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from penstock.kernels.attention.interface import (
    AttentionBackend,
    AttentionStep,
    Capability,
    HeadNorm,
    LayerAttention,
)
from penstock.kernels.norm_rope import RowScale, apply_rope, rms_norm

_MAX_BATCHED_TOKENS = 8  # longer slices keep the cores busy on their own
_TILE_TOKENS = 128  # a tile's first token sees fewer keys than its last, and pays for as many


@dataclass(frozen=True, slots=True)
class _Context:
    """The keys and values of some slices, in the pool itself or in blocks gathered from it."""

    num_slices: int
    num_keys: int  # of each slice
    first_slot: int = 0
    blocks: Tensor | None = None  # [2 * gathered blocks]: keys' first; None: the one slice is a run of the pool

    def read(self, pool: Tensor, shape: LayerAttention) -> tuple[Tensor, ...]:
        """Return keys and values, [slices, kv_heads, keys, head_dim] each.

        pool: [2 * blocks, numbers in a block], keys' blocks first.
        """
        if self.blocks is not None:
            pool = pool.index_select(0, self.blocks)
        half, token = pool.numel() // 2, shape.num_kv_heads * shape.head_dim
        both = pool.as_strided(
            (2, self.num_slices, shape.num_kv_heads, self.num_keys, shape.head_dim),
            (half, half // self.num_slices, shape.head_dim, token, 1),
            self.first_slot * token,
        )
        return both.unbind(0)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Slices with the same number of tokens, padded to the longest context."""

    tokens: Tensor | None  # [slices * num_tokens] where they are in the packed batch; None: all of it, in order
    num_tokens: int
    context: _Context
    bias: Tensor | None  # [slices, 1, group * num_tokens or 1, keys]; None: everything is visible


@dataclass(frozen=True, slots=True)
class _Tile:
    """Consecutive tokens of one slice."""

    start: int
    stop: int
    context: _Context
    bias: Tensor | None  # [tokens, keys]; None: plain causal


@dataclass(frozen=True, slots=True)
class _Plan:
    """How to run one step in the layers that share a window and a group size."""

    batches: list[_Batch]
    tiles: list[_Tile]


class CpuAttention(AttentionBackend):
    supports: ClassVar[Capability] = Capability(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
    )

    def __init__(self, layers: list[LayerAttention], kv_pool: list[Tensor]) -> None:
        super().__init__(layers, kv_pool)
        self._slots_of = [pool.flatten(1, 2) for pool in kv_pool]  # [2, slots, kv_heads, head_dim]
        self._blocks_of = [pool.flatten(0, 1).flatten(1) for pool in kv_pool]  # [2 * blocks, numbers in a block]
        self._kinds = [(layer.window, layer.num_heads // layer.num_kv_heads) for layer in layers]
        self._slots = torch.empty(0, dtype=torch.int64)
        self._plans: dict[tuple[int | None, int], _Plan] = {}

    def prepare(self, step: AttentionStep) -> None:
        self._slots = step.slots
        longest = max(step.context_lens)
        plans: dict[tuple[int | None, int], _Plan] = {}
        for window, group in set(self._kinds):
            effective = None if window is None or window >= longest else window
            if (effective, group) not in plans:
                plans[effective, group] = _Planner(step, self.kv_pool[0], effective, group).plan()
            plans[window, group] = plans[effective, group]
        self._plans = plans

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        return self._attend(torch.cat((q, k, v), dim=1), layer)

    def run_heads(
        self, heads: Tensor, rotation: Tensor, norm: HeadNorm | None, layer: int, scale: RowScale | None = None
    ) -> Tensor:
        shape = self.layers[layer]
        if scale is not None:
            heads.mul_(scale.factors()[:, None])
        rotated = heads[:, : shape.num_heads + shape.num_kv_heads]
        if norm is not None:
            rotated.copy_(rms_norm(rotated, norm.weight, norm.eps))
        apply_rope(rotated, rotation)
        return self._attend(heads, layer)

    def _attend(self, heads: Tensor, layer: int) -> Tensor:
        """heads: [tokens, query + key + value heads, head_dim] -> [tokens, heads * head_dim]."""
        shape, plan, pool = self.layers[layer], self._plans[self._kinds[layer]], self._blocks_of[layer]
        # Keys and values are neighbours in the projection: one copy writes both.
        written = heads[:, shape.num_heads :].view(-1, 2, shape.num_kv_heads, shape.head_dim)
        self._slots_of[layer].index_copy_(1, self._slots, written.transpose(0, 1))
        q = heads[:, : shape.num_heads]
        if len(plan.batches) == 1 and plan.batches[0].tokens is None:
            return _run_batch(q, plan.batches[0], shape, pool)
        outputs = q.new_empty(q.shape[0], shape.num_heads * shape.head_dim)
        for batch in plan.batches:
            assert batch.tokens is not None
            outputs[batch.tokens] = _run_batch(q[batch.tokens], batch, shape, pool)
        for tile in plan.tiles:
            outputs[tile.start : tile.stop] = _run_tile(q[tile.start : tile.stop], tile, shape, pool)
        return outputs


def _run_batch(q: Tensor, batch: _Batch, shape: LayerAttention, pool: Tensor) -> Tensor:
    """q: [slices * num_tokens, heads, head_dim] -> [slices * num_tokens, heads * head_dim]."""
    k, v = batch.context.read(pool, shape)
    num_tokens, group = batch.num_tokens, shape.num_heads // shape.num_kv_heads
    # The query heads that share a key head become rows of one small matrix: [slices, kv_heads, rows, head_dim].
    if num_tokens == 1:
        grouped = q.view(-1, shape.num_kv_heads, group, shape.head_dim)
        return _attention(grouped, k, v, batch.bias, shape).reshape(q.shape[0], -1)
    split = q.view(-1, num_tokens, shape.num_kv_heads, group, shape.head_dim)
    mixed = _attention(split.permute(0, 2, 3, 1, 4).flatten(2, 3), k, v, batch.bias, shape)
    parted = mixed.view(-1, shape.num_kv_heads, group, num_tokens, shape.head_dim)
    return parted.permute(0, 3, 1, 2, 4).reshape(q.shape[0], -1)


def _run_tile(q: Tensor, tile: _Tile, shape: LayerAttention, pool: Tensor) -> Tensor:
    """q: [tokens, heads, head_dim] -> [tokens, heads * head_dim]."""
    k, v = tile.context.read(pool, shape)
    mixed = _attention(q.transpose(0, 1).unsqueeze(0), k, v, tile.bias, shape, causal=tile.bias is None)
    return mixed.squeeze(0).transpose(0, 1).flatten(1)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, shape: LayerAttention, *, causal: bool = False
) -> Tensor:
    """q: [slices, heads or kv_heads, rows, head_dim]; k, v: [slices, kv_heads, keys, head_dim]. Shaped as q."""
    if shape.softcap is None:
        shared = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=causal, scale=shape.scale, enable_gqa=shared
        )
    # [slices, kv_heads, heads that share, rows, head_dim]
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[2], q.shape[3])
    scores = torch.matmul(grouped, k.transpose(2, 3).unsqueeze(2))
    scores.mul_(shape.scale / shape.softcap).tanh_().mul_(shape.softcap)
    if causal:
        positions = torch.arange(scores.shape[-1])
        bias = _bias(positions, positions, None, scores.dtype)
    if bias is not None:
        scores += bias if bias.ndim == 2 else bias.unsqueeze(2)
    return torch.matmul(scores.softmax(dim=-1), v.unsqueeze(2)).flatten(1, 2)


class _Planner:
    """Lays out one step for one window and group size."""

    def __init__(self, step: AttentionStep, pool: Tensor, window: int | None, group: int) -> None:
        self._step = step
        self._num_blocks, self._block_tokens = pool.shape[1:3]
        self._dtype = pool.dtype
        self._window = window
        self._group = group

    def plan(self) -> _Plan:
        by_size: dict[int, list[int]] = {}
        tiles: list[_Tile] = []
        for index, (start, stop) in enumerate(pairwise(self._step.query_starts)):
            if stop - start <= _MAX_BATCHED_TOKENS:
                by_size.setdefault(stop - start, []).append(index)
            else:
                tiles.extend(self._tile(index, first) for first in range(start, stop, _TILE_TOKENS))
        batches = [
            self._batch(slices, num_tokens)
            for num_tokens, members in by_size.items()
            for slices in self._by_length(members)
        ]
        return _Plan(batches, tiles)

    def _by_length(self, slices: list[int]) -> list[list[int]]:
        """Split slices so that no context is less than half the longest of its group."""
        lens = self._step.context_lens
        ordered = sorted(slices, key=lambda index: -lens[index])
        if 2 * lens[ordered[-1]] >= lens[ordered[0]]:
            return [slices]
        groups: list[list[int]] = []
        for index in ordered:
            if groups and 2 * lens[index] >= lens[groups[-1][0]]:
                groups[-1].append(index)
            else:
                groups.append([index])
        return groups

    def _batch(self, slices: list[int], num_tokens: int) -> _Batch:
        step = self._step
        lens = [step.context_lens[index] for index in slices]
        tokens = None
        if len(slices) < len(step.context_lens):
            starts = torch.tensor([step.query_starts[index] for index in slices])
            tokens = (starts[:, None] + torch.arange(num_tokens)).view(-1)
        if len(slices) == 1:
            context, first = self._context(slices[0], lens[0] - num_tokens, lens[0])
            firsts = torch.tensor([first])
        else:
            context, firsts = self._padded_context(slices, lens, num_tokens)
        bias = None
        if num_tokens > 1 or self._window is not None or min(lens) < context.num_keys:
            bias = self._batch_bias(torch.tensor(lens), firsts, num_tokens, context.num_keys)
        return _Batch(tokens, num_tokens, context, bias)

    def _batch_bias(self, lens: Tensor, firsts: Tensor, num_tokens: int, num_keys: int) -> Tensor:
        """Return [slices, 1, group * num_tokens or 1, keys]. firsts: [slices] position of each one's first key"""
        queries = lens[:, None] - num_tokens + torch.arange(num_tokens)  # [slices, num_tokens]
        keys = firsts[:, None] + torch.arange(num_keys)  # [slices, keys]
        bias = _bias(queries, keys, self._window, self._dtype)
        return bias.unsqueeze(1) if num_tokens == 1 else bias.repeat(1, self._group, 1).unsqueeze(1)

    def _tile(self, index: int, start: int) -> _Tile:
        end = self._step.query_starts[index + 1]
        stop = min(start + _TILE_TOKENS, end)
        last = self._step.context_lens[index] - (end - stop)
        first = last - (stop - start)  # positions of the tile's tokens: [first, last)
        context, first_key = self._context(index, first, last)
        bias = None
        if first > first_key or self._window is not None:
            bias = _bias(torch.arange(first, last), torch.arange(first_key, last), self._window, self._dtype)
        return _Tile(start, stop, context, bias)

    def _first_block(self, query: int) -> int:
        """The first block that a query at this position sees."""
        return 0 if self._window is None else max(0, query + 1 - self._window) // self._block_tokens

    def _context(self, index: int, query_start: int, query_stop: int) -> tuple[_Context, int]:
        """Return what these queries of a slice see, and the position of its first key."""
        first = self._first_block(query_start)
        blocks = self._step.block_tables[index, first : -(-query_stop // self._block_tokens)]
        first_key = first * self._block_tokens
        numbers = blocks.tolist()
        if _are_consecutive(numbers):
            return _Context(1, query_stop - first_key, numbers[0] * self._block_tokens), first_key
        return _Context(1, query_stop - first_key, blocks=self._of_both(blocks)), first_key

    def _padded_context(self, slices: list[int], lens: list[int], num_tokens: int) -> tuple[_Context, Tensor]:
        """Return the contexts of several slices, and the position of each one's first key."""
        block_tokens = self._block_tokens
        first = torch.tensor([self._first_block(length - num_tokens) for length in lens])
        stop = torch.tensor([-(-length // block_tokens) for length in lens])
        width = int((stop - first).max())
        tables = self._step.block_tables
        if len(slices) < len(tables):
            tables = tables[torch.tensor(slices)]
        # A shorter context reads its last block again; the bias hides what lies past its end.
        places = torch.minimum(first[:, None] + torch.arange(width), stop[:, None] - 1)
        blocks = self._of_both(tables.gather(1, places).view(-1))
        return _Context(len(slices), width * block_tokens, blocks=blocks), first * block_tokens

    def _of_both(self, blocks: Tensor) -> Tensor:
        """Where the blocks' keys and then their values are in a pool seen as [2 * blocks, ...]."""
        return torch.cat((blocks, blocks + self._num_blocks))


def _are_consecutive(numbers: Sequence[int]) -> bool:
    return all(right - left == 1 for left, right in pairwise(numbers))


def _bias(queries: Tensor, keys: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return 0 where a query sees a key, minus infinity elsewhere. [..., queries] and [..., keys] are positions."""
    distance = queries.unsqueeze(-1) - keys.unsqueeze(-2)  # [..., queries, keys]
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    return torch.zeros(distance.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
