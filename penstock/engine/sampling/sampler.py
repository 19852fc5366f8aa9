"""From a step's logits to its tokens, by each row's own parameters.

Rows are grouped by what they need, so that a plain greedy batch costs one reduction. Knows rows and positions; nothing
of requests or blocks.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from penstock.engine.messages import TokenLogprob
from penstock.engine.runner.transfer import to_device, to_host
from penstock.engine.sampling.drawer import Drawer, Draws, Filters
from penstock.engine.sampling.row_parameters import RowParameters
from penstock.kernels import sampling


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of the draws that asked for them."""

    draws: list[int]  # which draws
    num_top: list[int]  # how many alternatives each wants
    chosen: Tensor  # [len(draws)]
    top_values: Tensor  # [len(draws), most]
    top_ids: Tensor


@dataclass(slots=True)
class Sampled:
    """A step's draws, on the device; `to_host` sends them home."""

    tokens: Tensor  # [draws] int64
    best_logits: Tensor  # [draws]; not finite where the logits were broken
    logprobs: Logprobs | None

    def to_host(self) -> "Sampled":
        """Start copying to the host, in stream order."""
        logprobs = self.logprobs
        if logprobs is not None:
            logprobs = replace(
                logprobs,
                chosen=to_host(logprobs.chosen),
                top_values=to_host(logprobs.top_values),
                top_ids=to_host(logprobs.top_ids),
            )
        return Sampled(to_host(self.tokens), to_host(self.best_logits), logprobs)

    def read_logprobs(self, tokens: list[int]) -> dict[int, TokenLogprob]:
        """Return log-probabilities by draw, once they are on the host."""
        if self.logprobs is None:
            return {}
        found = self.logprobs
        values, ids = found.top_values.tolist(), found.top_ids.tolist()
        return {
            draw: TokenLogprob(tokens[draw], chosen, ids[i][:count], values[i][:count])
            for i, (draw, chosen, count) in enumerate(
                zip(found.draws, found.chosen.tolist(), found.num_top, strict=True)
            )
        }


class Sampler:
    """Draws one token per logits row."""

    def __init__(self, parameters: RowParameters, eos_token_ids: tuple[int, ...], drawer: Drawer) -> None:
        self._parameters = parameters
        self._eos_token_ids = eos_token_ids
        self._drawer = drawer

    def sample(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> Sampled:
        """Draw for each logits row. `positions` are those of the tokens to be drawn. logits: [n, vocab]."""
        parameters = self._parameters
        edited = self._edit(logits, rows, positions) if parameters.edits_logits[rows].any() else logits
        tokens, best_logits = self._draw(edited, rows, positions)
        logprobs = self._logprobs(logits, tokens, rows) if parameters.wants_logprobs[rows].any() else None
        if parameters.counts is not None:
            parameters.count_sampled(rows.tolist(), tokens)
        return Sampled(tokens, best_logits, logprobs)

    def _draw(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        """Draw rows with filters and rows without apart: what one row asks for must not change another's draw."""
        filtered = self._parameters.filters[rows]
        if not filtered.any():
            return self._drawer.draw(logits, self._draws(rows, positions))
        if filtered.all():
            return self._drawer.draw_filtered(logits, self._draws(rows, positions), self._filters(rows))
        tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        best = torch.empty(len(rows), dtype=torch.float32, device=logits.device)
        for group, with_filters in ((np.flatnonzero(~filtered), False), (np.flatnonzero(filtered), True)):
            index = to_device(group, logits.device)
            draws = self._draws(rows[group], positions[group])
            if with_filters:
                found = self._drawer.draw_filtered(logits[index], draws, self._filters(rows[group]))
            else:
                found = self._drawer.draw(logits[index], draws)
            tokens[index], best[index] = found
        return tokens, best

    def _draws(self, rows: np.ndarray, positions: np.ndarray) -> Draws:
        parameters = self._parameters
        return Draws(parameters.temperature[rows], parameters.seed[rows], positions)

    def _filters(self, rows: np.ndarray) -> Filters:
        parameters = self._parameters
        return Filters(
            *(parameters.to_device(values, rows) for values in (parameters.top_k, parameters.top_p, parameters.min_p))
        )

    def _edit(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> Tensor:
        """Apply biases, penalties and minimum lengths to a copy."""
        logits = logits.float().clone()
        parameters = self._parameters
        for draw, row in enumerate(rows.tolist()):
            params = parameters.params[row]
            if params.has_penalties:
                logits[draw] = self._penalise(logits[draw : draw + 1], row)[0]
            bias = parameters.biases[row]
            if bias is not None:
                ids, values = bias
                logits[draw, ids] += values
            if positions[draw] - parameters.num_prompt_tokens[row] < params.min_tokens:
                # A stop token may not be drawn before the minimum length is reached.
                logits[draw, list(self._eos_token_ids)] = float("-inf")
                logits[draw, parameters.stop_ids[row]] = float("-inf")
        return logits

    def _penalise(self, logits: Tensor, row: int) -> Tensor:
        counts, params = self._parameters.counts, self._parameters.params[row]
        assert counts is not None
        return sampling.penalise(
            logits,
            counts.output[row : row + 1],
            counts.seen[row : row + 1],
            torch.tensor([params.presence_penalty], device=logits.device),
            torch.tensor([params.frequency_penalty], device=logits.device),
            torch.tensor([params.repetition_penalty], device=logits.device),
        )

    def _logprobs(self, logits: Tensor, tokens: Tensor, rows: np.ndarray) -> Logprobs:
        draws = np.flatnonzero(self._parameters.wants_logprobs[rows])
        num_top = [self._parameters.params[row].logprobs or 0 for row in rows[draws].tolist()]
        index = to_device(draws, logits.device)
        chosen, values, ids = sampling.log_probabilities(logits[index], tokens[index], max(num_top))
        return Logprobs(draws.tolist(), num_top, chosen, values, ids)
