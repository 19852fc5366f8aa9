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
            draw: TokenLogprob(tokens[draw], chosen, list(zip(ids[i][:count], values[i][:count], strict=True)))
            for i, (draw, chosen, count) in enumerate(
                zip(found.draws, found.chosen.tolist(), found.num_top, strict=True)
            )
        }


class Sampler:
    """Draws one token per logits row."""

    def __init__(self, parameters: RowParameters, eos_token_ids: tuple[int, ...]) -> None:
        self._parameters = parameters
        self._eos_token_ids = eos_token_ids

    def sample(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> Sampled:
        """Draw for each logits row. `positions` are those of the tokens to be drawn. logits: [n, vocab] float32."""
        parameters = self._parameters
        edited = self._edit(logits, rows, positions) if parameters.edits_logits[rows].any() else logits
        best_logits, tokens = sampling.best(edited)
        random_draws = np.flatnonzero(parameters.temperature[rows])
        if len(random_draws):
            tokens = self._draw(edited, tokens, rows, positions, random_draws)
        logprobs = self._logprobs(logits, tokens, rows) if parameters.wants_logprobs[rows].any() else None
        if parameters.counts is not None:
            parameters.count_sampled(rows.tolist(), tokens)
        return Sampled(tokens, best_logits, logprobs)

    def _draw(
        self, logits: Tensor, tokens: Tensor, rows: np.ndarray, positions: np.ndarray, draws: np.ndarray
    ) -> Tensor:
        """Replace the greedy choice of the rows that sample."""
        parameters = self._parameters
        filtered = (
            (parameters.top_k[rows[draws]] > 0)
            | (parameters.top_p[rows[draws]] < 1.0)
            | (parameters.min_p[rows[draws]] > 0.0)
        )
        tokens = tokens.clone()
        for group, with_filters in ((draws[~filtered], False), (draws[filtered], True)):
            if len(group) == 0:
                continue
            index = to_device(group, logits.device)
            owners = rows[group]
            gather = parameters.to_device
            numbers = sampling.uniform(gather(parameters.seed, owners), to_device(positions[group], logits.device))
            picked = logits if len(group) == len(rows) else logits[index]
            temperatures = gather(parameters.temperature, owners)
            if with_filters:
                tokens[index] = sampling.draw_filtered(
                    picked,
                    temperatures,
                    numbers,
                    gather(parameters.top_k, owners),
                    gather(parameters.top_p, owners),
                    gather(parameters.min_p, owners),
                )
            else:
                tokens[index] = sampling.draw(picked, temperatures, numbers)
        return tokens

    def _edit(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> Tensor:
        """Apply biases, penalties and minimum lengths to a copy."""
        logits = logits.clone()
        parameters = self._parameters
        for draw, row in enumerate(rows.tolist()):
            params = parameters.params[row]
            if params.has_penalties:
                logits[draw] = self._penalise(logits[draw : draw + 1], row)[0]
            if params.logit_bias:
                ids = torch.tensor(list(params.logit_bias), device=logits.device)
                logits[draw, ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
            if positions[draw] - parameters.num_prompt_tokens[row] < params.min_tokens:
                # A stop token may not be drawn before the minimum length is reached.
                banned = [*self._eos_token_ids, *params.stop_token_ids]
                logits[draw, banned] = float("-inf")
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
