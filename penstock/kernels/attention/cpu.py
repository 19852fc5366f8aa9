"""Paged attention for CPUs, on torch's fused attention kernel.

Slices of a few tokens (decoding, verifying guesses) are batched: their blocks are gathered with one copy and run in one
call, grouped by length so that padding stays below the work itself. Longer slices run one by one in tiles, each over
the keys that it can see. A context whose blocks follow one another in the pool is read in place.

Everything that does not depend on a layer's numbers is made once, in `prepare`. Knows nothing of requests.
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
from penstock.kernels.norm_rope import apply_rope, rms_norm

_MAX_BATCHED_TOKENS = 8  # longer slices keep the cores busy on their own
_TILE_TOKENS = 128  # a tile's first token sees fewer keys than its last, and pays for as many


@dataclass(frozen=True, slots=True)
class _Context:
    """The keys and values of some slices: runs of slots in the pool, or in the blocks gathered from it.

    A layer's pool is seen as [2 * blocks, numbers in a block], keys first.
    """

    num_slices: int
    num_keys: int  # of each slice
    first_slot: int
    blocks: Tensor | None  # [2 * gathered blocks]; None: the slices lie in the pool, one after the other

    def read(self, pool: Tensor, num_blocks: int, shape: LayerAttention) -> tuple[Tensor, ...]:
        """Return keys and values, [slices, kv_heads, keys, head_dim] each."""
        token = shape.num_kv_heads * shape.head_dim
        values_after = num_blocks * pool.shape[1]
        if self.blocks is not None:
            pool = pool.index_select(0, self.blocks)
            values_after = pool.numel() // 2
        return pool.as_strided(
            (2, self.num_slices, shape.num_kv_heads, self.num_keys, shape.head_dim),
            (values_after, values_after // self.num_slices, shape.head_dim, token, 1),
            self.first_slot * token,
        ).unbind(0)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Slices with the same number of tokens, padded to the longest context."""

    tokens: Tensor | None  # [slices * num_tokens] where they are in the packed batch; None: all of it, in order
    num_tokens: int
    num_slices: int
    context: _Context
    bias: Tensor | None  # [slices, 1, group * num_tokens, context]; None: everything is visible


@dataclass(frozen=True, slots=True)
class _Tile:
    """Consecutive tokens of one slice."""

    start: int
    stop: int
    context: _Context
    bias: Tensor | None  # [tokens, context]; None: plain causal


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
        self._kinds = [(layer.window, layer.num_heads // layer.num_kv_heads) for layer in layers]
        self._slots = torch.empty(0, dtype=torch.int64)
        self._plans: dict[tuple[int | None, int], _Plan] = {}

    def prepare(self, step: AttentionStep) -> None:
        block_tokens, dtype = self.kv_pool[0].shape[2], self.kv_pool[0].dtype
        self._slots = step.slots
        longest = max(step.context_lens)
        made: dict[tuple[int | None, int], _Plan] = {}
        for kind in set(self._kinds):
            window, group = kind
            effective = None if window is None or window >= longest else window
            if (effective, group) not in made:
                made[effective, group] = _Planner(step, block_tokens, dtype, effective, group).plan()
            made[kind] = made[effective, group]
        self._plans = made

    def run_heads(self, heads: Tensor, rotation: Tensor, norm: HeadNorm | None, layer: int) -> Tensor:
        shape = self.layers[layer]
        rotated = heads[:, : shape.num_heads + shape.num_kv_heads]
        if norm is not None:
            rotated.copy_(rms_norm(rotated, norm.weight, norm.eps))
        apply_rope(rotated, rotation)
        # Keys and values are neighbours in the projection: one copy writes both.
        written = heads[:, shape.num_heads :].unflatten(1, (2, shape.num_kv_heads)).transpose(0, 1)
        self.kv_pool[layer].flatten(1, 2).index_copy_(1, self._slots, written)
        return self._attend(heads[:, : shape.num_heads], layer)

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        self.kv_pool[layer].flatten(1, 2).index_copy_(1, self._slots, torch.stack((k, v)))
        return self._attend(q, layer)

    def _attend(self, q: Tensor, layer: int) -> Tensor:
        """q: [tokens, heads, head_dim] -> [tokens, heads * head_dim]."""
        plan, shape, pool = self._plans[self._kinds[layer]], self.layers[layer], self.kv_pool[layer]
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
    k, v = batch.context.read(pool).unflatten(1, (batch.num_slices, -1)).transpose(2, 3)
    # The query heads that share a key head become rows of one small matrix: [slices, kv_heads, rows, head_dim].
    if batch.num_tokens == 1:
        grouped = q.unflatten(1, (shape.num_kv_heads, -1))
        return _attention(grouped, k, v, batch.bias, shape).reshape(q.shape[0], -1)
    folded = q.unflatten(1, (shape.num_kv_heads, -1)).unflatten(0, (-1, batch.num_tokens)).permute(0, 2, 3, 1, 4)
    mixed = _attention(folded.flatten(2, 3), k, v, batch.bias, shape)
    return mixed.unflatten(2, (-1, batch.num_tokens)).permute(0, 3, 1, 2, 4).reshape(q.shape[0], -1)


def _run_tile(q: Tensor, tile: _Tile, shape: LayerAttention, pool: Tensor) -> Tensor:
    """q: [tokens, heads, head_dim] -> [tokens, heads * head_dim]."""
    k, v = tile.context.read(pool).transpose(1, 2).unsqueeze(1)  # [1, kv_heads, context, head_dim] each
    mixed = _attention(q.transpose(0, 1).unsqueeze(0), k, v, tile.bias, shape, causal=tile.bias is None)
    return mixed.squeeze(0).transpose(0, 1).flatten(1)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, shape: LayerAttention, *, causal: bool = False
) -> Tensor:
    """q: [batch, heads or kv_heads, rows, head_dim]; k, v: [batch, kv_heads, context, head_dim]. Shaped as q."""
    if shape.softcap is None:
        shared = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=causal, scale=shape.scale, enable_gqa=shared
        )
    grouped = q.unflatten(1, (k.shape[1], -1))  # [batch, kv_heads, heads that share, rows, head_dim]
    scores = grouped @ k.transpose(2, 3).unsqueeze(2)
    scores.mul_(shape.scale / shape.softcap).tanh_().mul_(shape.softcap)
    if causal:
        rows, context = scores.shape[-2:]
        bias = _bias(torch.arange(context - rows, context), torch.arange(context), None, scores.dtype)
    if bias is not None:
        scores += bias if bias.ndim == 2 else bias.unsqueeze(2)
    return (scores.softmax(dim=-1) @ v.unsqueeze(2)).flatten(1, 2)


class _Planner:
    """Lays out one step for one window and group size."""

    def __init__(
        self, step: AttentionStep, block_tokens: int, dtype: torch.dtype, window: int | None, group: int
    ) -> None:
        self._step = step
        self._block_tokens = block_tokens
        self._dtype = dtype
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
        """Split slices so that none has a context less than half the longest of its group."""
        lens = self._step.context_lens
        if 2 * min(lens[index] for index in slices) >= max(lens[index] for index in slices):
            return [slices]
        groups: list[list[int]] = []
        for index in sorted(slices, key=lambda index: -lens[index]):
            if groups and 2 * lens[index] >= lens[groups[-1][0]]:
                groups[-1].append(index)
            else:
                groups.append([index])
        return groups

    def _batch(self, slices: list[int], num_tokens: int) -> _Batch:
        step = self._step
        lens = [step.context_lens[index] for index in slices]
        whole = len(slices) == len(step.context_lens)
        tokens = None
        if not whole or slices != sorted(slices):
            starts = torch.tensor([step.query_starts[index] for index in slices])
            tokens = (starts[:, None] + torch.arange(num_tokens)).view(-1)
        if len(slices) == 1:
            context, first = self._context(slices[0], lens[0] - num_tokens, lens[0])
            firsts = torch.tensor([first])
            num_keys = context.stop - context.start
        else:
            context, firsts, num_keys = self._padded_context(slices, lens, num_tokens)
        bias = None
        if num_tokens > 1 or self._window is not None or min(lens) < num_keys:
            bias = self._batch_bias(torch.tensor(lens), firsts, num_tokens, num_keys)
        return _Batch(tokens, num_tokens, len(slices), context, bias)

    def _batch_bias(self, lens: Tensor, firsts: Tensor, num_tokens: int, num_keys: int) -> Tensor:
        """Return [slices, 1, group * num_tokens, num_keys]. firsts: [slices] position of each one's first key"""
        queries = lens[:, None] - num_tokens + torch.arange(num_tokens)  # [slices, num_tokens]
        keys = firsts[:, None] + torch.arange(num_keys)  # [slices, num_keys]
        bias = _bias(queries, keys, self._window, self._dtype)
        return bias.unsqueeze(1) if num_tokens == 1 else bias.repeat(1, self._group, 1).unsqueeze(1)

    def _tile(self, index: int, start: int) -> _Tile:
        begin, end = self._step.query_starts[index : index + 2]
        stop = min(start + _TILE_TOKENS, end)
        context_stop = self._step.context_lens[index] - (end - stop)
        context_start = context_stop - (stop - start)
        context, first = self._context(index, context_start, context_stop)
        bias = None
        if context_start > first or self._window is not None:
            queries, keys = torch.arange(context_start, context_stop), torch.arange(first, context_stop)
            bias = _bias(queries, keys, self._window, self._dtype)
        return _Tile(start, stop, context, bias)

    def _first_block(self, query: int) -> int:
        """The first block that a query at this position sees."""
        return 0 if self._window is None else max(0, query + 1 - self._window) // self._block_tokens

    def _context(self, index: int, query_start: int, query_stop: int) -> tuple[_Context, int]:
        """Return what these queries of a slice see, and the position of its first key."""
        first = self._first_block(query_start)
        blocks = self._step.block_tables[index, first : -(-query_stop // self._block_tokens)]
        position = first * self._block_tokens
        num_keys = query_stop - position
        if not _are_consecutive(blocks.tolist()):
            return _Context(0, num_keys, blocks), position
        start = int(blocks[0]) * self._block_tokens
        return _Context(start, start + num_keys), position

    def _padded_context(self, slices: list[int], lens: list[int], num_tokens: int) -> tuple[_Context, Tensor, int]:
        """Return the contexts of several slices, the position of each one's first key, and their common length."""
        block_tokens = self._block_tokens
        first = torch.tensor([self._first_block(length - num_tokens) for length in lens])
        stop = torch.tensor([-(-length // block_tokens) for length in lens])
        width = int((stop - first).max())
        tables = self._step.block_tables
        if len(slices) < len(tables):
            tables = tables[torch.tensor(slices)]
        if self._window is None:
            chosen = tables[:, :width]
        else:
            # A shorter context reads its last block again; the bias hides what lies past its end.
            places = torch.minimum(first[:, None] + torch.arange(width), stop[:, None] - 1)
            chosen = tables.gather(1, places)
        num_keys = width * block_tokens
        return _Context(0, num_keys * len(slices), chosen.reshape(-1)), first * block_tokens, num_keys


def _are_consecutive(blocks: Sequence[int]) -> bool:
    return all(right - left == 1 for left, right in pairwise(blocks))


def _bias(queries: Tensor, keys: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return 0 where a query sees a key, minus infinity elsewhere. [..., queries] and [..., keys] are positions."""
    distance = queries.unsqueeze(-1) - keys.unsqueeze(-2)  # [..., queries, keys]
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    return torch.zeros(distance.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
