"""The rows: each running request's tokens and block table, in tensors that live as long as the engine.

A plan ships only what changed. Tokens are read and written where they are: a sampled token becomes the next step's
input without passing through the host.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.engine.runner.transfer import to_device
from penstock.engine.scheduler.step_plan import BlockAssignment, RowSlice, RowStart


class BatchRows:
    """Persistent row state. `tables_host` mirrors `tables`; on a CPU they are the same memory.

    One row more than asked for belongs to nobody: a captured graph pads its batch with it.
    """

    def __init__(self, num_rows: int, max_context_tokens: int, block_tokens: int, device: torch.device) -> None:
        self.block_tokens = block_tokens
        self.device = device
        # One more than the context: the last sampled token is written though it never runs.
        self.width = max_context_tokens + 1
        self.max_blocks = -(-self.width // block_tokens)
        self.scratch_row = num_rows
        self.tokens = torch.zeros(num_rows + 1, self.width, dtype=torch.int32, device=device)
        self.tables_host = np.zeros((num_rows + 1, self.max_blocks), np.int32)
        self.tables = torch.from_numpy(self.tables_host).to(device)

    def start(self, start: RowStart) -> None:
        """Ship a new owner's tokens."""
        tokens = to_device(np.array(start.token_ids, np.int32), self.device)
        self.tokens[start.row, : len(tokens)] = tokens

    def assign(self, changes: Sequence[BlockAssignment]) -> None:
        """Set entries of block tables."""
        if not changes:
            return
        rows = np.fromiter((change.row for change in changes), np.int64, len(changes))
        indices = np.fromiter((change.index for change in changes), np.int64, len(changes))
        blocks = np.fromiter((change.block for change in changes), np.int32, len(changes))
        self.tables_host[rows, indices] = blocks
        if self.device.type != "cpu":
            places = to_device(rows * self.max_blocks + indices, self.device)
            self.tables.view(-1).index_copy_(0, places, to_device(blocks, self.device))

    def write_drafts(self, slices: Sequence[RowSlice]) -> None:
        """Put guesses where the step will read them."""
        for piece in slices:
            if piece.drafts:
                end = piece.start + piece.num_tokens
                drafts = to_device(np.array(piece.drafts, np.int32), self.device)
                self.tokens[piece.row, end - len(piece.drafts) : end] = drafts

    def read(self, rows: np.ndarray, positions: np.ndarray) -> Tensor:
        """Return the tokens at (row, position) pairs. [n] int32."""
        return self.tokens.view(-1).index_select(0, self._places(rows, positions))

    def write(self, rows: np.ndarray, positions: np.ndarray, tokens: Tensor) -> None:
        """Store sampled tokens, [n], at (row, position) pairs."""
        self.tokens.view(-1).index_copy_(0, self._places(rows, positions), tokens.to(torch.int32))

    def slots(self, rows: np.ndarray, positions: np.ndarray) -> Tensor:
        """Return where each token's KV goes: block x block_tokens + offset. [n] int64."""
        blocks = self.tables_host[rows, positions // self.block_tokens].astype(np.int64)
        return to_device(blocks * self.block_tokens + positions % self.block_tokens, self.device)

    def tables_of(self, rows: np.ndarray, num_blocks: int) -> Tensor:
        """Return the leading columns of these rows' block tables. [n, num_blocks] int32."""
        if self.device.type == "cpu":
            return torch.from_numpy(self.tables_host[rows, :num_blocks])
        return self.tables[:, :num_blocks].index_select(0, to_device(rows, self.device))

    def _places(self, rows: np.ndarray, positions: np.ndarray) -> Tensor:
        return to_device(rows * self.width + positions, self.device)
