"""Decode steps as captured graphs: one launch instead of hundreds.

A graph is captured for each batch size of a ladder, largest first, so that all share the largest one's memory. A step
takes the smallest that holds it; the rest of its rows are the scratch row. Only plain decoding: one token per row, and
a draw from its whole distribution. Rows and positions go in as one copy, tokens come out as one.
"""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from penstock.engine.runner.batch_rows import BatchRows
from penstock.engine.runner.token_draw import DrawOutcome, TokenDraw
from penstock.engine.runner.transfer import StagingRing
from penstock.kernels.attention.interface import AttentionBackend, AttentionStep, WantedTokens
from penstock.kernels.product_tuner import ProductTuner
from penstock.models.decoder import Decoder

T = TypeVar("T")


class Forward(Protocol):
    """A forward pass: token ids, positions and the prepared attention in, hidden states out."""

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend, wanted: WantedTokens | None = None
    ) -> Tensor: ...


def batch_sizes(most: int) -> list[int]:
    """The ladder: dense where batches are small, then in steps that waste little."""
    ladder = [1, 2, 4, *range(8, 64, 8), *range(64, 257, 16), *range(288, 4097, 32)]
    return [size for size in ladder if size < most] + [most]


def is_rehearsed(size: int) -> bool:
    """Whether a step of this size is among those that go through every kernel that others may want."""
    return size.bit_count() == 1


def capture(body: Callable[[], T], stream: torch.cuda.Stream, pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """Capture what `body` launches, every kernel of which must have run before: first uses compile and make handles.

    Leaner than torch's context manager, which collects garbage and empties the allocator's cache: graphs are also
    captured between the steps of a server.
    """
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), _no_collection():
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            output = body()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, output


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage meanwhile: letting go of pinned memory or of another graph would spoil a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class DecodeGraphs:
    """Captured decode steps over persistent rows."""

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        rows: BatchRows,
        draw: TokenDraw,
        tuner: ProductTuner,
        *,
        max_batch: int,
    ) -> None:
        self._model = model
        self.tuner = tuner
        self._attention = attention
        self._rows = rows
        self._draw = draw
        self._sizes = batch_sizes(max_batch)
        # Rows and then positions of a graph's whole batch.
        self._inputs = torch.zeros(2 * max_batch, dtype=torch.int64, device=rows.device)
        self._staging = StagingRing(2 * max_batch)
        self._starts = torch.arange(max_batch + 1, dtype=torch.int32, device=rows.device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.stream = torch.cuda.Stream()
        self.pool: Any = torch.cuda.graph_pool_handle()  # the memory that all graphs share

    @torch.inference_mode()
    def tune(self, seconds: float) -> None:
        """Have products of every size run as is known to be best, or found out in so many seconds."""
        self.tuner.allow(seconds)
        # The likeliest first: trials end when their time is over.
        for size in sorted(self._sizes, key=lambda size: (size % 64 != 0, size)):
            self._model.tune(size, self.tuner)
            self._model.tune_logits(size, self.tuner)
        self.tuner.allow(0.0)
        self.tuner.save()

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Go through steps of some sizes, so that their kernels are asked for: see `compiling_ahead`."""
        for size in filter(is_rehearsed, self._sizes):
            self._touch(size)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size, largest first."""
        for size in reversed(self._sizes):
            self._capture(size)

    def renew(self, size: int) -> None:
        """Capture a size again, if it is one: its products run another way now."""
        if size in self._graphs:
            self._capture(size)

    def run(self, rows: np.ndarray, positions: np.ndarray) -> DrawOutcome:
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
        return self._draw.outcome(logits, count)

    def _capture(self, size: int) -> None:
        self._touch(size)
        body = functools.partial(self._step, size, self._model.forward)
        self._graphs[size] = capture(body, self.stream, self.pool)

    def _touch(self, size: int) -> None:
        """Load every kernel that a step of nobody's rows launches."""
        self._inputs[:size] = self._rows.scratch_row
        self._inputs[size : 2 * size] = 0
        self._step(size, self._model.touch)

    def _step(self, size: int, forward: Forward) -> Tensor:
        """The captured body: everything it reads is in persistent tensors."""
        rows, positions = self._inputs[:size], self._inputs[size : 2 * size]
        inputs = self._draw.gather(rows, positions)
        self._attention.prepare(
            AttentionStep(
                num_decodes=size,
                query_starts=list(range(size + 1)),
                context_lens=[self._rows.width - 1] * size,
                slots=inputs.slots,
                block_tables=self._rows.tables.index_select(0, rows),
                lens=inputs.lens,
                starts=self._starts[: size + 1],
            )
        )
        logits = self._model.logits(forward(inputs.token_ids, positions, self._attention))
        self._draw.draw(logits, inputs)
        return logits
