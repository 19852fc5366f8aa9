"""Rotary position embedding: a table of rotations, one row for each position.

The frequencies depend on the rope's scaling. Two scalings let them depend on a length as well, and there a server must
choose one length for all, because a cached key is rotated once and outlives the step that made it:

- `dynamic` (NTK) leaves frequencies alone up to the trained length, as the reference does. Where a longer context is
  served, all positions use the frequencies of that longest context; the reference would change them with each token.
- `longrope` uses the short factors where the served context fits the trained length and the long ones where it does
  not. The reference chooses by the request's own length: the results agree for every request when the short factors
  are in use, and for requests longer than the trained length when the long ones are.

Knows nothing of heads or attention.
"""

import math

import torch
from torch import Tensor

from penstock.models.spec import RopeSpec


class Rope:
    """Rotations for positions below `context_tokens`."""

    def __init__(self, spec: RopeSpec, context_tokens: int, device: torch.device) -> None:
        frequencies, scale = rope_frequencies(spec, context_tokens)
        angles = torch.outer(torch.arange(context_tokens, dtype=torch.float32), frequencies)
        # [context_tokens, rotary_dim / 2]
        self.table = torch.polar(torch.full_like(angles, scale), angles).to(device)

    def rotations(self, positions: Tensor) -> Tensor:
        """positions: [tokens] -> complex64 [tokens, 1, rotary_dim / 2], for all layers of a step."""
        return self.table[positions].unsqueeze(1)


def rope_frequencies(spec: RopeSpec, context_tokens: int) -> tuple[Tensor, float]:
    """Return the angle that each pair turns by per position, float32 [rotary_dim / 2], and the length of a rotation."""
    if spec.scaling == "dynamic":
        return _plain(_stretched_theta(spec, context_tokens), spec.rotary_dim), 1.0
    plain = _plain(spec.theta, spec.rotary_dim)
    if spec.scaling == "none":
        return plain, 1.0
    if spec.scaling == "linear":
        return plain / spec.factor, 1.0
    if spec.scaling == "llama3":
        return _llama3(spec, plain), 1.0
    if spec.scaling == "yarn":
        return _yarn(spec, plain), _yarn_scale(spec)
    factors = spec.long_factor if context_tokens > spec.original_max_position else spec.short_factor
    return plain / torch.tensor(factors, dtype=torch.float32), _longrope_scale(spec)


def _plain(theta: float, rotary_dim: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)


def _stretched_theta(spec: RopeSpec, context_tokens: int) -> float:
    length = max(context_tokens, spec.original_max_position)
    growth = spec.factor * length / spec.original_max_position - (spec.factor - 1)
    return float(spec.theta * growth ** (spec.rotary_dim / (spec.rotary_dim - 2)))


def _llama3(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Keep the fast pairs, divide the slow ones by the factor, and blend between the two."""
    turns = spec.original_max_position * plain / (2 * math.pi)  # full turns within the trained length
    kept = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * plain + (1 - kept) * plain / spec.factor


def _yarn(spec: RopeSpec, plain: Tensor) -> Tensor:
    """As llama3, but the blend is linear in the pair's number instead of its frequency."""

    def pair_with(turns: float) -> float:
        ratio = spec.original_max_position / (turns * 2 * math.pi)
        return spec.rotary_dim * math.log(ratio) / (2 * math.log(spec.theta))

    low, high = pair_with(spec.beta_fast), pair_with(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    width = high - low if high != low else 0.001
    divided = ((torch.arange(spec.rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return divided * plain / spec.factor + (1 - divided) * plain


def _yarn_scale(spec: RopeSpec) -> float:
    if spec.attention_factor is not None:
        return spec.attention_factor

    def scale(weight: float) -> float:
        return 1.0 if spec.factor <= 1 else 0.1 * weight * math.log(spec.factor) + 1.0

    if spec.mscale and spec.mscale_all_dim:
        return scale(spec.mscale) / scale(spec.mscale_all_dim)
    return scale(1.0)


def _longrope_scale(spec: RopeSpec) -> float:
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(spec.factor) / math.log(spec.original_max_position))
