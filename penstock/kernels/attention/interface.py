"""What an attention backend must do, and what one step tells it.

Knows tensors, blocks and lengths. Never hears of a request.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.norm_rope import RowScale, apply_rope, rms_norm


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What is fixed for one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # a token sees itself and the window - 1 before it; None: all
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """An RMS norm over each query and key head."""

    weight: Tensor  # float32 [query heads + key heads, head_dim]
    eps: float


@dataclass(frozen=True, slots=True)
class WantedTokens:
    """The tokens of a step whose states somebody wants: those that are drawn from, each the last of its slice.

    Behind the last layer's keys and values no other token's state is used.
    """

    index: Tensor  # [n] int64: which of the packed tokens
    lens: Tensor  # [n] int32: tokens visible to each, itself included
    block_tables: Tensor  # [n, blocks] int32


@dataclass(slots=True)
class AttentionStep:
    """One step's layout. Tokens of all slices are packed in the order of the slices.

    The first `num_decodes` slices have exactly one token each; the rest may have any number.
    """

    num_decodes: int
    query_starts: list[int]  # [slices + 1] where each slice's tokens begin in the packed batch
    context_lens: list[int]  # [slices] tokens visible to the slice's last token, itself included
    slots: Tensor  # [tokens] int64: block * block_tokens + offset, where each token's key and value go
    block_tables: Tensor  # [slices, blocks] int32, on the device; entries past a slice's end are any valid block
    # On CUDA the lengths are on the device as well, so that a captured graph reads the current ones.
    lens: Tensor | None = None  # [slices] int32: context_lens
    starts: Tensor | None = None  # [slices + 1] int32: query_starts
    # A step captured for any mix of slices has what `plan` said of the current one on the device. Then every slice
    # counts as a decode, or none where none will be; the lists above are the most there can be, and tokens past the
    # last slice's are nobody's.
    plan: Tensor | None = None  # [plan_size] int32
    wanted: WantedTokens | None = None  # None: any may be asked for


@dataclass(frozen=True, slots=True)
class Capability:
    """What a backend can run: data, so that choosing one needs no calls."""

    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    head_dims: frozenset[int] | None = None  # None: any
    window: bool = True
    softcap: bool = True


class AttentionBackend(ABC):
    """One way to run paged attention on one device.

    The KV pool is one tensor per layer, [2, blocks, block_tokens, kv_heads, head_dim]: keys, then values.
    """

    supports: ClassVar[Capability]
    captures_prompts: ClassVar[bool] = False  # whether a step with prompts can be captured, which takes the plan below

    def __init__(self, layers: list[LayerAttention], kv_pool: list[Tensor]) -> None:
        self.layers = layers
        self.kv_pool = kv_pool

    @abstractmethod
    def prepare(self, step: AttentionStep) -> None:
        """Build per-step metadata once, before any layer runs."""

    def plan_size(self, num_tokens: int, num_slices: int) -> int:
        """How long the plan of a captured step is that holds at most so many tokens and slices."""
        return 0

    def plan(
        self,
        num_decodes: int,
        query_starts: np.ndarray,
        context_lens: np.ndarray,
        *,
        num_tokens: int,
        num_slices: int,
    ) -> np.ndarray:
        """Return what a captured step needs to know of its slices beside their lengths. [plan_size] int32."""
        return np.zeros(0, np.int32)

    @abstractmethod
    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Write k and v to the cache and attend.

        q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]. Returns [tokens, heads * head_dim].
        """

    def run_heads(
        self, heads: Tensor, rotation: Tensor, norm: HeadNorm | None, layer: int, scale: RowScale | None = None
    ) -> Tensor:
        """Norm and rotate the heads of a fused projection, then `run`. A backend may do all of it in one kernel.

        heads: [tokens, query + key + value heads, head_dim], which the backend may overwrite; rotation: as for
        `apply_rope`; scale: what the heads of each token are multiplied with first. Returns [tokens, heads * head_dim].
        """
        shape = self.layers[layer]
        if scale is not None:
            heads = (heads * scale.factors()[:, None]).to(heads.dtype)
        rotated, v = heads.split((shape.num_heads + shape.num_kv_heads, shape.num_kv_heads), dim=1)
        if norm is not None:
            rotated = rms_norm(rotated, norm.weight, norm.eps)
        apply_rope(rotated, rotation)
        return self.run(rotated[:, : shape.num_heads], rotated[:, shape.num_heads :], v, layer)

    def run_wanted(
        self,
        heads: Tensor,
        rotation: Tensor,
        norm: HeadNorm | None,
        layer: int,
        wanted: WantedTokens,
        scale: RowScale | None = None,
    ) -> Tensor:
        """As `run_heads`, of which only the wanted tokens' results are returned: [n, heads * head_dim]."""
        return self.run_heads(heads, rotation, norm, layer, scale).index_select(0, wanted.index)
