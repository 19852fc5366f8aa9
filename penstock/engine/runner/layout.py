"""Where a step's tokens are: which row, position and slice each belongs to. Host arrays only."""

from dataclasses import dataclass

import numpy as np

from penstock.engine.scheduler.step_plan import RowSlice


def plain_decode(slices: list[RowSlice]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return each slice's row and position, [slices] int64, if each is one token that is followed by one draw."""
    # Slices of one token come first, so the last one speaks for all.
    if slices[-1].num_tokens > 1 or not all([piece.num_samples for piece in slices]):
        return None
    count = len(slices)
    rows = np.fromiter([piece.row for piece in slices], np.int64, count)
    return rows, np.fromiter([piece.start for piece in slices], np.int64, count)


@dataclass(slots=True)
class Layout:
    """One step's tokens, packed in the order of its slices."""

    rows: np.ndarray  # [tokens] int64
    positions: np.ndarray  # [tokens] int64
    slice_rows: np.ndarray  # [slices] int64
    query_starts: np.ndarray  # [slices + 1] int64
    context_lens: np.ndarray  # [slices] int64
    num_decodes: int
    sampled: np.ndarray  # [draws] int64: which tokens of the batch are followed by a draw

    @classmethod
    def of(cls, slices: list[RowSlice]) -> "Layout":
        table = np.array([(piece.row, piece.start, piece.num_tokens, piece.num_samples) for piece in slices], np.int64)
        slice_rows, starts, sizes, draws = table.T.copy()
        ends = np.cumsum(sizes)
        draw_ends = np.cumsum(draws)
        return cls(
            rows=np.repeat(slice_rows, sizes),
            positions=np.arange(ends[-1]) - np.repeat(ends - sizes - starts, sizes),
            slice_rows=slice_rows,
            query_starts=np.concatenate(([0], ends)),
            context_lens=starts + sizes,
            num_decodes=int(np.count_nonzero(sizes == 1)),
            sampled=np.arange(draw_ends[-1]) + np.repeat(ends - draw_ends, draws),
        )
