"""Paged attention by the kernels of `kernels.triton`: nothing to install beside torch, nothing to plan on the host.

A step is cut in two: slices of one token run the decode kernel, the others the prefill kernel. `prepare` of a step that
has no prefill neither waits for the device nor copies to it, so such a step can be captured in a CUDA graph once it has
run outside of one. So can a step with prefill whose tiles come with it as a plan: both kernels are launched for as many
slices and tiles as there may be, and programs that find no work exit. Knows tensors, blocks and lengths.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.attention.interface import (
    AttentionBackend,
    AttentionStep,
    Capability,
    HeadNorm,
    LayerAttention,
    WantedTokens,
)
from penstock.kernels.norm_rope import RowScale

if TYPE_CHECKING:
    from penstock.kernels.triton.paged_decode import ChosenSplits, DecodeWorkspace, Splits
    from penstock.kernels.triton.prefill_kernels import PrefillKernel

# Of the multiprocessors, what a prefill beside many decodes may take at once; so few are done before it matters.
_FEW_PROGRAMS = 0.6
_FEW_DECODES = 32
_SPLITS_SIZE = 2  # of a plan, numbers that say how contexts are split


class TritonPagedAttention(AttentionBackend):
    supports: ClassVar[Capability] = Capability(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        head_dims=frozenset({16, 32, 64, 80, 96, 128, 256}),
    )
    captures_prompts: ClassVar[bool] = True

    def __init__(self, layers: list[LayerAttention], kv_pool: list[Tensor]) -> None:
        super().__init__(layers, kv_pool)
        device = kv_pool[0].device
        is_cuda = device.type == "cuda"
        self._num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else 1
        self._few_programs = int(_FEW_PROGRAMS * self._num_multiprocessors)
        # The widest layer's. A workspace that became too small stays: a captured graph may still use it.
        self._largest = max(layers, key=lambda layer: layer.num_heads * layer.head_dim)
        self._workspaces: list[DecodeWorkspace] = []
        self._side_stream = torch.cuda.Stream() if is_cuda else None
        self._prefill_kernels: dict[LayerAttention, PrefillKernel] = {}

    def prepare(self, step: AttentionStep) -> None:
        assert step.lens is not None and step.starts is not None
        self._step = step
        self._lens, self._starts = step.lens, step.starts
        self._decode_lens = step.lens
        if step.num_decodes:
            self._division = self._divide(step.num_decodes, step.block_tables, step.plan)
        if step.wanted is not None:
            self._wanted_division = self._divide(len(step.wanted.index), step.wanted.block_tables)
        self._tiles: dict[int, Tensor] = {}
        self._side = self._side_stream if step.plan is not None and step.num_decodes else None
        if step.plan is not None:
            self._read_plan(step.plan, len(step.lens), num_tokens=len(step.slots))

    def plan_size(self, num_tokens: int, num_slices: int) -> int:
        num_tiles = sum(_most_tiles(num_tokens, num_slices, size) for size in self._tile_sizes())
        return _SPLITS_SIZE + num_slices + 2 * num_tiles

    def plan(
        self,
        num_decodes: int,
        query_starts: np.ndarray,
        context_lens: np.ndarray,
        *,
        num_tokens: int,
        num_slices: int,
    ) -> np.ndarray:
        from penstock.kernels.triton.paged_prefill import NO_TILE, SPARE_TILE, list_tiles

        # First how contexts are split and the lengths of the decodes, zero for all other slices; then the tiles, for
        # every size that is used.
        numbers = np.zeros(self.plan_size(num_tokens, num_slices), np.int32)
        splits = self._choose_splits(num_decodes, int(context_lens[:num_decodes].max(initial=1)))
        numbers[:_SPLITS_SIZE] = splits.count, splits.min_tokens
        numbers[_SPLITS_SIZE : _SPLITS_SIZE + num_decodes] = context_lens[:num_decodes]
        begin = _SPLITS_SIZE + num_slices
        for size in self._tile_sizes():
            tiles = list_tiles(query_starts[num_decodes:], context_lens[num_decodes:], size)
            tiles[:, 0] += num_decodes
            spare = np.arange(query_starts[-1], num_tokens, size, dtype=np.int32)
            tiles = np.concatenate([tiles, np.stack([np.full_like(spare, SPARE_TILE), spare], axis=1)])
            end = begin + 2 * _most_tiles(num_tokens, num_slices, size)
            numbers[begin : begin + tiles.size] = tiles.reshape(-1)
            numbers[begin + tiles.size : end] = NO_TILE
            begin = end
        return numbers

    def _read_plan(self, plan: Tensor, num_slices: int, num_tokens: int) -> None:
        begin = _SPLITS_SIZE + num_slices
        self._decode_lens = plan[_SPLITS_SIZE:begin]
        for size in self._tile_sizes():
            end = begin + 2 * _most_tiles(num_tokens, num_slices, size)
            self._tiles[size] = plan[begin:end].view(-1, 2)
            begin = end

    def _tile_sizes(self) -> list[int]:
        """In tokens, of all layers."""
        return sorted({self._prefill_kernel(layer).tile_tokens for layer in set(self.layers)})

    def _prefill_kernel(self, layer: LayerAttention) -> "PrefillKernel":
        from penstock.kernels.triton.prefill_kernels import prefill_kernel

        if layer not in self._prefill_kernels:
            self._prefill_kernels[layer] = prefill_kernel(layer, self.kv_pool[0])
        return self._prefill_kernels[layer]

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        keys, values = self.kv_pool[layer].flatten(1, 2)  # [slots, kv_heads, head_dim] each
        keys[self._step.slots] = k.to(keys.dtype)
        values[self._step.slots] = v.to(values.dtype)
        return self._attend(q, layer)

    def run_heads(
        self, heads: Tensor, rotation: Tensor, norm: HeadNorm | None, layer: int, scale: RowScale | None = None
    ) -> Tensor:
        self._rotate(heads, rotation, norm, layer, scale)
        return self._attend(heads[:, : self.layers[layer].num_heads], layer)

    def run_wanted(
        self,
        heads: Tensor,
        rotation: Tensor,
        norm: HeadNorm | None,
        layer: int,
        wanted: WantedTokens,
        scale: RowScale | None = None,
    ) -> Tensor:
        from penstock.kernels.triton.paged_decode import paged_decode

        # All keys and values are in the pool then: to those before it each of these tokens is one that decodes.
        self._rotate(heads, rotation, norm, layer, scale)
        shape = self.layers[layer]
        q = heads[:, : shape.num_heads].index_select(0, wanted.index)
        out = q.new_empty(len(q), shape.num_heads * shape.head_dim)
        paged_decode(q, self.kv_pool[layer], wanted.block_tables, wanted.lens, out, shape, *self._wanted_division)
        return out

    def _rotate(
        self, heads: Tensor, rotation: Tensor, norm: HeadNorm | None, layer: int, scale: RowScale | None
    ) -> None:
        """Scale, norm and rotate heads in place, and write keys and values to the pool."""
        from penstock.kernels.triton.rope_cache import rotate_and_cache

        rotate_and_cache(
            heads,
            rotation,
            None if norm is None else (norm.weight, norm.eps),
            self._step.slots,
            self.kv_pool[layer],
            scale,
            num_heads=self.layers[layer].num_heads,
        )

    def _attend(self, q: Tensor, layer: int) -> Tensor:
        """Attend to what is in the pool. q: [tokens, heads, head_dim]."""
        from penstock.kernels.triton.paged_decode import paged_decode

        shape, step = self.layers[layer], self._step
        num_decodes = step.num_decodes
        num_tokens = q.shape[0]
        out = q.new_empty(num_tokens, shape.num_heads * shape.head_dim)
        has_prefill = num_decodes < num_tokens or step.plan is not None
        # Each program of the prefill needs a multiprocessor for itself: few go first and leave a long decode the
        # others, many go last and take over what the decode leaves.
        num_programs = self._prefill_kernel(shape).num_programs(num_tokens, shape) if has_prefill else 0
        prefill_first = has_prefill and num_decodes > _FEW_DECODES and num_programs <= self._few_programs
        launches: list[Callable[[], None]] = [partial(self._prefill, q, out, layer)] if has_prefill else []
        if num_decodes:
            decode = partial(
                paged_decode,
                q[:num_decodes],
                self.kv_pool[layer],
                step.block_tables,
                self._decode_lens,
                out[:num_decodes],
                shape,
                *self._division,
                overlap=not prefill_first,
            )
            launches.insert(1 if prefill_first else 0, decode)
        self._launch(launches)
        return out

    def _launch(self, launches: list[Callable[[], None]]) -> None:
        """Launch in this order, side by side where there is a side stream: neither kernel alone fills the device."""
        if self._side is None:
            for launch in launches:
                launch()
            return
        main = torch.cuda.current_stream()
        self._side.wait_stream(main)
        first, second = launches
        first()
        with torch.cuda.stream(self._side):
            second()
        main.wait_stream(self._side)

    def _prefill(self, q: Tensor, out: Tensor, layer: int) -> None:
        shape, step = self.layers[layer], self._step
        kernel = self._prefill_kernel(shape)
        if kernel.tile_tokens not in self._tiles:
            self._tiles[kernel.tile_tokens] = self._list_tiles(kernel.tile_tokens)
        tiles = self._tiles[kernel.tile_tokens]
        kernel.run(q, self.kv_pool[layer], step.block_tables, self._lens, self._starts, tiles, out, shape)

    def _divide(
        self, num_decodes: int, block_tables: Tensor, plan: Tensor | None = None
    ) -> "tuple[Splits | ChosenSplits, DecodeWorkspace]":
        """Return how contexts are divided, and room for their parts: kernels run one after another and may share it."""
        from penstock.kernels.triton.paged_decode import ChosenSplits, DecodeWorkspace, most_parts

        layer = self._largest
        max_context = block_tables.shape[1] * self.kv_pool[0].shape[2]
        splits: Splits | ChosenSplits
        if plan is None:
            splits = self._choose_splits(num_decodes, max_context)
        else:
            most = most_parts(num_decodes, layer.num_kv_heads, max_context, self._num_multiprocessors)
            splits = ChosenSplits(plan[:_SPLITS_SIZE], most)
        num_parts = splits.num_parts(num_decodes)
        if not self._workspaces or not self._workspaces[-1].fits(num_parts, layer):
            self._workspaces.append(DecodeWorkspace.of(num_parts, layer, block_tables.device))
        return splits, self._workspaces[-1]

    def _choose_splits(self, num_decodes: int, max_context: int) -> "Splits":
        from penstock.kernels.triton.paged_decode import choose_splits

        return choose_splits(num_decodes, self._largest.num_kv_heads, max_context, self._num_multiprocessors)

    def _list_tiles(self, tile_tokens: int) -> Tensor:
        from penstock.kernels.triton.paged_prefill import list_tiles

        step = self._step
        first = step.num_decodes
        tiles = list_tiles(step.query_starts[first:], step.context_lens[first:], tile_tokens)
        tiles[:, 0] += first
        listed = torch.from_numpy(tiles)
        device = step.block_tables.device
        return listed.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else listed


def _most_tiles(num_tokens: int, num_slices: int, tile_tokens: int) -> int:
    """Of a step: each slice, and the rows that are nobody's, may end with a tile that is not full."""
    return num_tokens // tile_tokens + num_slices + 1
