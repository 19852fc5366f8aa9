"""Runs a decoder over a paged cache whose blocks are handed out in random order, as the engine's runner would.

For tests that compare logits. Keeps what the scheduler keeps: each request's length and blocks.
"""

import random

import torch
from torch import Tensor

from penstock.kernels.attention.interface import AttentionBackend, AttentionStep
from penstock.kernels.attention.reference import ReferenceAttention
from penstock.models.decoder import Decoder, attention_layers
from penstock.parallel.groups import SINGLE, Group

BLOCK_TOKENS = 4


class PagedDecoder:
    def __init__(
        self,
        decoder: Decoder,
        *,
        num_blocks: int = 96,
        block_tokens: int = BLOCK_TOKENS,
        backend: type[AttentionBackend] = ReferenceAttention,
        group: Group = SINGLE,
        device: str = "cpu",
    ) -> None:
        layers = attention_layers(decoder.spec, group)
        # What no request wrote must not matter.
        pool = [
            torch.full(
                (2, num_blocks, block_tokens, layer.num_kv_heads, layer.head_dim),
                1e4,
                dtype=decoder.dtype,
                device=device,
            )
            for layer in layers
        ]
        self.decoder = decoder
        self.backend = backend(layers, pool)
        self.block_tokens = block_tokens
        self.device = device
        self._free = list(range(num_blocks))
        random.Random(0).shuffle(self._free)
        self._blocks: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def step(self, *slices: tuple[str, list[int]]) -> list[Tensor]:
        """Run tokens of some requests in one forward pass. Returns each one's logits, [tokens, vocab], in order."""
        order = sorted(range(len(slices)), key=lambda index: len(slices[index][1]) > 1)
        layout = [slices[index] for index in order]
        positions = [list(self._extend(request, len(tokens))) for request, tokens in layout]
        starts = [0]
        for _, tokens in layout:
            starts.append(starts[-1] + len(tokens))
        slots = [
            self._blocks[request][position // self.block_tokens] * self.block_tokens + position % self.block_tokens
            for (request, _), of_slice in zip(layout, positions, strict=True)
            for position in of_slice
        ]
        lens = [self._lengths[request] for request, _ in layout]
        self.backend.prepare(
            AttentionStep(
                num_decodes=sum(len(tokens) == 1 for _, tokens in layout),
                query_starts=starts,
                context_lens=lens,
                slots=torch.tensor(slots, device=self.device),
                block_tables=self._block_tables([request for request, _ in layout]),
                lens=torch.tensor(lens, dtype=torch.int32, device=self.device),
                starts=torch.tensor(starts, dtype=torch.int32, device=self.device),
            )
        )
        token_ids = torch.tensor([token for _, tokens in layout for token in tokens], device=self.device)
        flat_positions = torch.tensor([position for of_slice in positions for position in of_slice], device=self.device)
        logits = self.decoder.logits(self.decoder.forward(token_ids, flat_positions, self.backend))
        by_slice = {index: logits[starts[place] : starts[place + 1]] for place, index in enumerate(order)}
        return [by_slice[index] for index in range(len(slices))]

    def run(self, request: str, token_ids: list[int], chunk: int | None = None) -> Tensor:
        """Run a request alone, `chunk` tokens at a time (None: all at once). Returns [tokens, vocab]."""
        size = chunk or len(token_ids)
        chunks = [token_ids[first : first + size] for first in range(0, len(token_ids), size)]
        return torch.cat([self.step((request, tokens))[0] for tokens in chunks])

    def _extend(self, request: str, num_tokens: int) -> range:
        start = self._lengths.get(request, 0)
        self._lengths[request] = start + num_tokens
        blocks = self._blocks.setdefault(request, [])
        while len(blocks) * self.block_tokens < start + num_tokens:
            blocks.append(self._free.pop())
        return range(start, start + num_tokens)

    def _block_tables(self, requests: list[str]) -> Tensor:
        width = max(len(self._blocks[request]) for request in requests)
        rows = [self._blocks[request] + [0] * (width - len(self._blocks[request])) for request in requests]
        return torch.tensor(rows, dtype=torch.int32, device=self.device)
