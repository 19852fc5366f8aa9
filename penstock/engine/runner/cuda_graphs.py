"""Decode steps as captured graphs: one launch instead of hundreds.

A graph is captured for each batch size of a ladder, largest first, so that all share the largest one's memory. A step
takes the smallest that holds it; the rest of its rows are the scratch row. Only plain decoding: one token per row, and
a draw from its whole distribution. Rows and positions go in as one copy, tokens come out as one.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.engine.runner.batch_rows import BatchRows
from penstock.engine.runner.transfer import StagingRing, to_host
from penstock.engine.sampling.row_parameters import RowParameters
from penstock.engine.sampling.sampler import Sampled
from penstock.kernels.attention.interface import AttentionBackend, AttentionStep
from penstock.models.decoder import Decoder

# Bytes of a drawn token and of its logit.
_TOKEN_BYTES, _LOGIT_BYTES = 8, 4


def batch_sizes(most: int) -> list[int]:
    """The ladder: dense where batches are small, then in steps that waste little."""
    ladder = [1, 2, 4, *range(8, 64, 8), *range(64, 257, 16), *range(288, 4097, 32)]
    return [size for size in ladder if size < most] + [most]


@dataclass(frozen=True, slots=True)
class DecodeOutcome:
    """What a replay leaves on the device, valid until the next one."""

    logits: Tensor  # [n, vocab]
    drawn: Tensor  # uint8: tokens of the whole graph, then their logits
    count: int
    size: int  # of the graph

    def to_host(self) -> Sampled:
        """Start copying the draws to the host, in stream order."""
        packed = to_host(self.drawn)
        middle = self.size * _TOKEN_BYTES
        tokens, best = packed[:middle].view(torch.int64), packed[middle:].view(torch.float32)
        return Sampled(tokens[: self.count], best[: self.count], None)


class DecodeGraphs:
    """Captured decode steps over persistent rows."""

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        rows: BatchRows,
        parameters: RowParameters,
        max_batch: int,
    ) -> None:
        from penstock.kernels.triton.sampling import SamplingWorkspace

        self._model = model
        self._attention = attention
        self._rows = rows
        self._parameters = parameters
        self._sizes = batch_sizes(max_batch)
        # Rows and then positions of a graph's whole batch.
        self._inputs = torch.zeros(2 * max_batch, dtype=torch.int64, device=rows.device)
        self._staging = StagingRing(2 * max_batch)
        self._starts = torch.arange(max_batch + 1, dtype=torch.int32, device=rows.device)
        self._drawn = torch.empty(max_batch * (_TOKEN_BYTES + _LOGIT_BYTES), dtype=torch.uint8, device=rows.device)
        self._workspace: SamplingWorkspace = SamplingWorkspace.of(max_batch, rows.device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None  # the memory that all graphs share

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size, largest first."""
        for size in reversed(self._sizes):
            self._inputs[:size] = self._rows.scratch_row
            self._inputs[size : 2 * size] = 0
            self._capture(size)

    def run(self, rows: np.ndarray, positions: np.ndarray) -> DecodeOutcome:
        """Run one token of each row, draw the next and write it to the row."""
        count = len(rows)
        size = next(size for size in self._sizes if size >= count)
        with self._staging.slot() as staged:
            staged.values[:count] = rows
            staged.values[count:size] = self._rows.scratch_row
            staged.values[size : size + count] = positions
            staged.values[size + count : 2 * size] = 0
            self._inputs[: 2 * size].copy_(staged.tensor[: 2 * size], non_blocking=True)
        graph, logits = self._graphs[size]
        graph.replay()
        return DecodeOutcome(logits[:count], self._drawn_of(size), count, size)

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
        from penstock.kernels.triton.decode_inputs import gather_decode_inputs
        from penstock.kernels.triton.sampling import TokenTable, sample

        rows, positions = self._inputs[:size], self._inputs[size : 2 * size]
        state, parameters = self._rows, self._parameters
        inputs = gather_decode_inputs(
            rows,
            positions,
            state.tokens,
            state.tables,
            parameters.device_temperature,
            parameters.device_seed,
            state.block_tokens,
        )
        self._attention.prepare(
            AttentionStep(
                num_decodes=size,
                query_starts=list(range(size + 1)),
                context_lens=[state.width - 1] * size,
                slots=inputs.slots,
                block_tables=state.tables.index_select(0, rows),
                lens=inputs.lens,
                starts=self._starts[: size + 1],
            )
        )
        logits = self._model.logits(self._model.forward(inputs.token_ids, positions, self._attention))
        drawn, middle = self._drawn_of(size), size * _TOKEN_BYTES
        sample(
            logits,
            inputs.temperatures,
            inputs.seeds,
            inputs.next_positions,
            self._workspace,
            out=(drawn[:middle].view(torch.int64), drawn[middle:].view(torch.float32)),
            table=TokenTable(state.tokens, inputs.places),
        )
        return logits

    def _drawn_of(self, size: int) -> Tensor:
        return self._drawn[: size * (_TOKEN_BYTES + _LOGIT_BYTES)]
