"""Paged attention written to be seen to be right: one slice at a time, in float32, on any device.

The yardstick for the other backends. Knows nothing of speed.
"""

from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from penstock.kernels.attention.interface import AttentionBackend, AttentionStep, Capability, LayerAttention


class ReferenceAttention(AttentionBackend):
    supports: ClassVar[Capability] = Capability(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
    )

    def prepare(self, step: AttentionStep) -> None:
        self.step = step

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        keys, values = self.kv_pool[layer].flatten(1, 2)  # [slots, kv_heads, head_dim] each
        keys[self.step.slots] = k.to(keys.dtype)
        values[self.step.slots] = v.to(values.dtype)
        starts = self.step.query_starts
        outputs = [
            attend(
                q[start:stop],
                self._context(layer, 0, index),
                self._context(layer, 1, index),
                self.layers[layer],
            )
            for index, (start, stop) in enumerate(pairwise(starts))
        ]
        return torch.cat(outputs).flatten(1)

    def _context(self, layer: int, which: int, index: int) -> Tensor:
        """Gather the keys (0) or values (1) a slice sees: [context, kv_heads, head_dim]."""
        blocks = self.kv_pool[layer][which]  # [blocks, block_tokens, kv_heads, head_dim]
        num_tokens = self.step.context_lens[index]
        num_blocks = -(-num_tokens // blocks.shape[1])
        return blocks[self.step.block_tables[index, :num_blocks].long()].flatten(0, 1)[:num_tokens]


def attend(q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention) -> Tensor:
    """Causal attention of the last len(q) positions of a context.

    q: [tokens, heads, head_dim]; k, v: [context, kv_heads, head_dim]. Returns [tokens, heads, head_dim].
    """
    exact = torch.promote_types(q.dtype, torch.float32)
    repeats = layer.num_heads // layer.num_kv_heads
    k = k.to(exact).repeat_interleave(repeats, dim=1)
    v = v.to(exact).repeat_interleave(repeats, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.to(exact), k) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    key_positions = torch.arange(len(k), device=q.device)
    query_positions = key_positions[len(k) - len(q) :, None]
    hidden = key_positions > query_positions
    if layer.window is not None:
        hidden |= key_positions <= query_positions - layer.window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
