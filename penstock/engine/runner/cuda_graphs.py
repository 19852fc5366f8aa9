"""Decode steps as captured graphs: one launch instead of hundreds.

A graph is captured for each batch size of a ladder, largest first, so that all share the largest one's memory. A step
takes the smallest that holds it; the rest of its rows are the scratch row. Only plain decoding: one token per row.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.engine.runner.batch_rows import BatchRows
from penstock.engine.runner.transfer import to_device
from penstock.kernels.attention.interface import AttentionBackend, AttentionStep
from penstock.models.decoder import Decoder


def batch_sizes(most: int) -> list[int]:
    """The ladder: dense where batches are small, then in steps that waste little."""
    ladder = [1, 2, 4, *range(8, 64, 8), *range(64, 257, 16), *range(288, 4097, 32)]
    return [size for size in ladder if size < most] + [most]


class DecodeGraphs:
    """Captured decode steps over persistent rows."""

    def __init__(self, model: Decoder, attention: AttentionBackend, rows: BatchRows, max_batch: int) -> None:
        self._model = model
        self._attention = attention
        self._rows = rows
        self._sizes = batch_sizes(max_batch)
        self._rows_in = torch.full((max_batch,), rows.scratch_row, dtype=torch.int64, device=rows.device)
        self._positions_in = torch.zeros(max_batch, dtype=torch.int64, device=rows.device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None  # the memory that all graphs share

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size, largest first."""
        for size in reversed(self._sizes):
            self._capture(size)

    def run(self, rows: np.ndarray, positions: np.ndarray) -> Tensor:
        """Run one token of each row; return logits [n, vocab], valid until the next run."""
        count = len(rows)
        size = next(size for size in self._sizes if size >= count)
        padded = np.full((2, size), 0, np.int64)
        padded[0, count:] = self._rows.scratch_row
        padded[0, :count] = rows
        padded[1, :count] = positions
        inputs = to_device(padded, self._rows.device)
        self._rows_in[:size].copy_(inputs[0])
        self._positions_in[:size].copy_(inputs[1])
        graph, logits = self._graphs[size]
        graph.replay()
        return logits[:count]

    def _capture(self, size: int) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(size)  # first use compiles kernels and makes library handles, which capture forbids
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            logits = self._step(size)
        self._pool = graph.pool()
        self._graphs[size] = (graph, logits)

    def _step(self, size: int) -> Tensor:
        """The captured body: everything it reads is in persistent tensors."""
        rows, positions = self._rows_in[:size], self._positions_in[:size]
        state = self._rows
        token_ids = state.tokens.view(-1).index_select(0, rows * state.width + positions)
        places = rows * state.max_blocks + positions // state.block_tokens
        blocks = state.tables.view(-1).index_select(0, places).long()
        self._attention.prepare(
            AttentionStep(
                num_decodes=size,
                query_starts=list(range(size + 1)),
                context_lens=[state.width - 1] * size,
                slots=blocks * state.block_tokens + positions % state.block_tokens,
                block_tables=state.tables.index_select(0, rows),
                lens=(positions + 1).to(torch.int32),
                starts=torch.arange(size + 1, dtype=torch.int32, device=state.device),
            )
        )
        return self._model.logits(self._model.forward(token_ids, positions, self._attention))
