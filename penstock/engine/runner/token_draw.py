"""The end of a captured step: a plain draw for each row, written to the row and packed for the host.

Knows rows, their parameters and logits; nothing of graphs or of how the logits came about.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.engine.runner.batch_rows import BatchRows
from penstock.engine.runner.transfer import to_host
from penstock.engine.sampling.row_parameters import RowParameters
from penstock.engine.sampling.sampler import Sampled

if TYPE_CHECKING:
    from penstock.kernels.triton.decode_inputs import DecodeInputs

# Bytes of a drawn token and of its logit.
_TOKEN_BYTES, _LOGIT_BYTES = 8, 4


@dataclass(frozen=True, slots=True)
class DrawOutcome:
    """What a captured draw leaves on the device, valid until the next one."""

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


class TokenDraw:
    """Draws from whole distributions, into memory that stays where it is."""

    def __init__(self, rows: BatchRows, parameters: RowParameters, max_batch: int) -> None:
        from penstock.kernels.triton.sampling import SamplingWorkspace

        self._rows = rows
        self._parameters = parameters
        self._drawn = torch.empty(max_batch * (_TOKEN_BYTES + _LOGIT_BYTES), dtype=torch.uint8, device=rows.device)
        self._workspace: SamplingWorkspace = SamplingWorkspace.of(max_batch, rows.device)

    def gather(self, rows: Tensor, positions: Tensor) -> "DecodeInputs":
        """Find what a step must know of tokens at these rows and positions, [n] int64 each."""
        from penstock.kernels.triton.decode_inputs import gather_decode_inputs

        state, parameters = self._rows, self._parameters
        return gather_decode_inputs(
            rows,
            positions,
            state.tokens,
            state.tables,
            parameters.device_temperature,
            parameters.device_seed,
            state.block_tokens,
        )

    def draw(self, logits: Tensor, inputs: "DecodeInputs") -> None:
        """Draw each row's next token. logits: [n, vocab]; inputs: of the token before it."""
        from penstock.kernels.triton.sampling import TokenTable, sample

        size = len(logits)
        drawn, middle = self._drawn_of(size), size * _TOKEN_BYTES
        sample(
            logits,
            inputs.temperatures,
            inputs.seeds,
            inputs.next_positions,
            self._workspace,
            out=(drawn[:middle].view(torch.int64), drawn[middle:].view(torch.float32)),
            table=TokenTable(self._rows.tokens, inputs.places),
        )

    def outcome(self, logits: Tensor, count: int) -> DrawOutcome:
        """What was drawn from these logits, of which `count` rows are real."""
        return DrawOutcome(logits[:count], self._drawn_of(len(logits)), count, len(logits))

    def _drawn_of(self, size: int) -> Tensor:
        return self._drawn[: size * (_TOKEN_BYTES + _LOGIT_BYTES)]
