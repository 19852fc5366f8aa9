"""Random steps over a paged pool whose every unused number is poison, for tests of attention kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.attention.interface import AttentionStep, LayerAttention


@dataclass(slots=True)
class PagedBatch:
    """One step: slices of `queries[i]` tokens that end a context of `contexts[i]`."""

    step: AttentionStep
    pool: Tensor  # [2, blocks, block_tokens, kv_heads, head_dim]: what the contexts hold before the step, else NaN
    q: Tensor  # [tokens, heads, head_dim]
    k: Tensor  # [tokens, kv_heads, head_dim]
    v: Tensor

    @classmethod
    def random(
        cls,
        queries: list[int],
        contexts: list[int],
        layer: LayerAttention,
        *,
        dtype: torch.dtype,
        device: str,
        block_tokens: int = 16,
        seed: int = 0,
    ) -> "PagedBatch":
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype).to(device)

        counts = [-(-context // block_tokens) for context in contexts]
        num_blocks = sum(counts) + 2
        order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()  # block 0 belongs to nobody
        # Entries past a slice's end name another's block, as they may.
        tables = torch.full((len(queries), max(counts) + 1), order[-1], dtype=torch.int32)
        pool = torch.full((2, num_blocks, block_tokens, layer.num_kv_heads, layer.head_dim), float("nan"))
        pool = pool.to(dtype).to(device)
        slots: list[int] = []
        used = 0
        for index, (num_queries, context) in enumerate(zip(queries, contexts, strict=True)):
            blocks = order[used : used + counts[index]]
            used += counts[index]
            tables[index, : len(blocks)] = torch.tensor(blocks)
            places = [blocks[at // block_tokens] * block_tokens + at % block_tokens for at in range(context)]
            cached = places[: context - num_queries]
            pool.flatten(1, 2)[:, cached] = normal(2, len(cached), layer.num_kv_heads, layer.head_dim)
            slots += places[context - num_queries :]
        starts = [0, *torch.tensor(queries).cumsum(0).tolist()]
        step = AttentionStep(
            num_decodes=next((i for i, size in enumerate(queries) if size != 1), len(queries)),
            query_starts=starts,
            context_lens=contexts,
            slots=torch.tensor(slots, device=device),
            block_tables=tables.to(device),
            lens=torch.tensor(contexts, dtype=torch.int32, device=device),
            starts=torch.tensor(starts, dtype=torch.int32, device=device),
        )
        return cls(
            step,
            pool,
            normal(starts[-1], layer.num_heads, layer.head_dim),
            normal(starts[-1], layer.num_kv_heads, layer.head_dim),
            normal(starts[-1], layer.num_kv_heads, layer.head_dim),
        )
