"""The rows: each running request's tokens and block table, in tensors that live as long as the engine.

A plan ships only what changed. Tokens are read and written where they are: a sampled token becomes the next step's input
without passing through the host.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.engine.scheduler.step_plan import BlockAssignment, RowSlice, RowStart


class BatchRows:
    """Persistent row state. `tables_host` mirrors `tables`; on a CPU they are the same memory."""

    def __init__(self, num_rows: int, max_context_tokens: int, block_tokens: int, device: torch.device) -> None:
        self.block_tokens = block_tokens
        self.device = device
        # One more than the context: the last sampled token is written though it never runs.
        self.width = max_context_tokens + 1
        self.max_blocks = -(-self.width // block_tokens)
        self.tokens = torch.zeros(num_rows, self.width, dtype=torch.int32, device=device)
        self.tables_host = np.zeros((num_rows, self.max_blocks), np.int32)
        self.tables = torch.from_numpy(self.tables_host).to(device)

    def start(self, start: RowStart) -> None:
        """Ship a new owner's tokens."""
        tokens = torch.tensor(start.token_ids, dtype=torch.int32)
        self.tokens[start.row, : len(tokens)] = tokens.to(self.device, non_blocking=True)

    def assign(self, changes: Sequence[BlockAssignment]) -> None:
        """Set entries of block tables."""
        if not changes:
            return
        rows = np.fromiter((change.row for change in changes), np.int64, len(changes))
        indices = np.fromiter((change.index for change in changes), np.int64, len(changes))
        blocks = np.fromiter((change.block for change in changes), np.int32, len(changes))
        self.tables_host[rows, indices] = blocks
        if self.device.type != "cpu":
            places = torch.from_numpy(rows * self.max_blocks + indices).to(self.device, non_blocking=True)
            self.tables.view(-1)[places] = torch.from_numpy(blocks).to(self.device, non_blocking=True)

    def write_drafts(self, slices: Sequence[RowSlice]) -> None:
        """Put guesses where the step will read them."""
        for piece in slices:
            if piece.drafts:
                end = piece.start + piece.num_tokens
                drafts = torch.tensor(piece.drafts, dtype=torch.int32)
                self.tokens[piece.row, end - len(piece.drafts) : end] = drafts.to(self.device)

    def read(self, rows: np.ndarray, positions: np.ndarray) -> Tensor:
        """Return the tokens at (row, position) pairs. [n] int32."""
        return self.tokens.view(-1).index_select(0, self._places(rows, positions))

    def write(self, rows: np.ndarray, positions: np.ndarray, tokens: Tensor) -> None:
        """Store sampled tokens, [n], at (row, position) pairs."""
        self.tokens.view(-1).index_copy_(0, self._places(rows, positions), tokens.to(torch.int32))

    def slots(self, rows: np.ndarray, positions: np.ndarray) -> Tensor:
        """Return where each token's KV goes: block x block_tokens + offset. [n] int64."""
        blocks = self.tables_host[rows, positions // self.block_tokens].astype(np.int64)
        return self._to_device(blocks * self.block_tokens + positions % self.block_tokens)

    def tables_of(self, rows: np.ndarray, num_blocks: int) -> Tensor:
        """Return the leading columns of these rows' block tables. [n, num_blocks] int32."""
        if self.device.type == "cpu":
            return torch.from_numpy(self.tables_host[rows, :num_blocks])
        return self.tables[self._to_device(rows), :num_blocks]

    def _places(self, rows: np.ndarray, positions: np.ndarray) -> Tensor:
        return self._to_device(rows * self.width + positions)

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)
