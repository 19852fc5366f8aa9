"""How each row samples: what its request asked for, ready to be gathered for a step's rows.

Scalars sit in host arrays, one entry per row; the rare vocabulary-wide state (token counts for penalties) is made on
the device the first time a request needs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.engine.runner.transfer import to_device
from penstock.engine.scheduler.step_plan import RowStart
from penstock.request import SamplingParams


@dataclass(slots=True)
class TokenCounts:
    """Which tokens a row has, for penalties. [rows, vocab] each."""

    output: Tensor  # int32: how often in the answer
    seen: Tensor  # bool: in the prompt or the answer


class RowParameters:
    """Sampling parameters of all rows."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._shape = (num_rows, vocab_size)
        self.params: list[SamplingParams] = [SamplingParams()] * num_rows
        self.num_prompt_tokens = np.zeros(num_rows, np.int64)
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int64)
        self.top_p = np.ones(num_rows, np.float32)
        self.min_p = np.zeros(num_rows, np.float32)
        self.seed = np.zeros(num_rows, np.int64)
        # Rows whose logits need more than temperature and filters: penalties, biases, a minimum length.
        self.edits_logits = np.zeros(num_rows, bool)
        self.wants_logprobs = np.zeros(num_rows, bool)
        self.filters = np.zeros(num_rows, bool)  # rows that sample from a part of the vocabulary
        self.is_plain = np.ones(num_rows, bool)  # rows that need none of these three
        self.counts: TokenCounts | None = None
        # Made once: a request may name a thousand tokens, and every step that runs it needs them.
        self.biases: list[tuple[Tensor, Tensor] | None] = [None] * num_rows  # token ids and what is added to them
        self.stop_ids: list[Tensor | None] = [None] * num_rows  # of rows with a minimum length
        # What a captured step reads, one row more for the one that pads its batch.
        self.device_temperature = torch.zeros(num_rows + 1, dtype=torch.float32, device=device)
        self.device_seed = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)

    def start(self, start: RowStart) -> None:
        """Take over a row's new owner."""
        row, params = start.row, start.params
        self.params[row] = params
        self.num_prompt_tokens[row] = start.num_prompt_tokens
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = start.seed
        self.edits_logits[row] = params.has_penalties or bool(params.logit_bias) or params.min_tokens > 0
        self.biases[row] = self._bias(params)
        self.stop_ids[row] = (
            torch.tensor(params.stop_token_ids, dtype=torch.int64, device=self._device) if params.min_tokens else None
        )
        self.wants_logprobs[row] = params.logprobs is not None
        narrowed = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        self.filters[row] = narrowed and not params.greedy
        self.is_plain[row] = not (self.edits_logits[row] or self.wants_logprobs[row] or self.filters[row])
        # Filled, not assigned: to assign a number is to wait for the device.
        self.device_temperature[row].fill_(params.temperature)
        self.device_seed[row].fill_(start.seed)
        if params.has_penalties:
            self._count(start)

    def count_sampled(self, rows: Sequence[int], tokens: Tensor) -> None:
        """Add sampled tokens, one per row, to the counts of rows that have penalties."""
        chosen = [index for index, row in enumerate(rows) if self.params[row].has_penalties]
        if not chosen or self.counts is None:
            return
        row_index = torch.tensor([rows[index] for index in chosen], device=self._device)
        token_index = tokens[torch.tensor(chosen, device=self._device)]
        self.counts.output[row_index, token_index] += 1
        self.counts.seen[row_index, token_index] = True

    def to_device(self, values: np.ndarray, rows: np.ndarray) -> Tensor:
        """Gather a host array's entries of these rows onto the device."""
        return to_device(values[rows], self._device)

    def _bias(self, params: SamplingParams) -> tuple[Tensor, Tensor] | None:
        if not params.logit_bias:
            return None
        ids = torch.tensor(list(params.logit_bias), device=self._device)
        return ids, torch.tensor(list(params.logit_bias.values()), device=self._device)

    def _count(self, start: RowStart) -> None:
        if self.counts is None:
            self.counts = TokenCounts(
                torch.zeros(self._shape, dtype=torch.int32, device=self._device),
                torch.zeros(self._shape, dtype=torch.bool, device=self._device),
            )
        tokens = torch.tensor(start.token_ids, device=self._device)
        output = tokens[start.num_prompt_tokens :]
        self.counts.output[start.row] = torch.bincount(output, minlength=self._shape[1])
        self.counts.seen[start.row] = False
        self.counts.seen[start.row, tokens] = True
