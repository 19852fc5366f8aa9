"""Choosing tokens from logits, without a full sort.

A draw depends on its row's logits, parameters, seed and position alone, so it is the same whatever else is in the
batch, however the prompt was chunked and wherever the request resumed. Each token's noise is its own, a hash of seed,
position and token, and the highest sum of score and noise wins: logits that differ in their last bits give the same
token, unless two sums are that close. (Looking up one number in the running sum of probabilities would not: there the
last bits of every probability move all the bounds behind it.) Never hears of a request.
"""

import torch
from torch import Tensor

# Candidates that top-p looks at before it falls back to sorting the whole vocabulary.
_TOP_CANDIDATES = 1024

# The least and the largest noise that 23 bits give are this far apart.
_NOISE_RANGE = 19.5

# Below this temperature scores would overflow; it already takes the best token unless others equal it.
_LEAST_TEMPERATURE = 1e-5

_MASK = (1 << 64) - 1
_LOW = (1 << 32) - 1


def _as_signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


_INCREMENT = _as_signed(0x9E3779B97F4A7C15)
_MIX_1 = _as_signed(0xBF58476D1CE4E5B9)
_MIX_2 = _as_signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser: every input bit reaches every output bit. Wraps around on purpose."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return what decides each draw. seeds, positions: [n] int64 -> [n] int64."""
    return _mix(_mix(seeds + _INCREMENT) + positions * _INCREMENT)


def noise(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return what is added to each token's score, of Gumbel's distribution. keys, tokens: int64 -> float32.

    A hash of 32 bits, because the CUDA kernel does the same for every token of the vocabulary.
    """
    mixed = (tokens * 0x9E3779B1 + (keys & _LOW)) & _LOW
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B + _shift_right(keys, 32)) & _LOW
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & _LOW
    # 23 bits and a half are exact in float32, neither zero nor one, and small where the noise is large.
    share = (((mixed ^ (mixed >> 16)) >> 9).to(torch.float32) + 0.5) * 2.0**-23
    return -torch.log(-torch.log1p(-share))


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return (highest logit, its token) of each row. NaN wins, so a broken row shows. logits: [n, vocab]."""
    found = logits.max(dim=-1)
    return found.values, found.indices


def draw(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw from each row's whole distribution. logits: [n, vocab]; the rest: [n] -> [n] int64."""
    scores = logits / temperatures.clamp(min=_LEAST_TEMPERATURE)[:, None]
    # No noise closes a wider gap, so the rest of the vocabulary needs none.
    reachable = ~(scores < scores.amax(dim=-1, keepdim=True) - _NOISE_RANGE)
    keys = _keys(seeds, positions)
    winners = []
    for row in range(len(scores)):
        tokens = reachable[row].nonzero()[:, 0]
        winners.append(_winner(scores[row, tokens], tokens, keys[row]))
    return torch.stack(winners)


def draw_filtered(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """Draw after top-k, then min-p, then top-p. top_k: [n] int64, 0 for no limit; top_p, min_p: [n] float32."""
    vocab_size = logits.shape[-1]
    probabilities = torch.softmax(logits / temperatures.clamp(min=_LEAST_TEMPERATURE)[:, None], dim=-1)
    limit = min(vocab_size, _TOP_CANDIDATES)
    ranked, tokens = torch.topk(probabilities, limit, dim=-1)
    if limit < vocab_size and bool(_needs_more(ranked, top_k, top_p, min_p).any()):
        ranked, tokens = torch.sort(probabilities, dim=-1, descending=True)
    ranks = torch.arange(ranked.shape[-1], device=logits.device)
    kept = torch.where((top_k[:, None] == 0) | (ranks < top_k[:, None]), ranked, 0.0)
    kept = torch.where(kept >= min_p[:, None] * kept[:, :1], kept, 0.0)
    # Unfiltered so far, the whole distribution's mass is one, though the candidates may hold less.
    mass = torch.where((top_k == 0) & (min_p == 0.0), 1.0, kept.sum(dim=-1))
    before = kept.cumsum(dim=-1) - kept
    stays = (before < (top_p * mass)[:, None]) & (kept > 0.0)
    stays[:, 0] = True
    keys = _keys(seeds, positions)
    return torch.stack(
        [_winner(kept[row, stays[row]].log(), tokens[row, stays[row]], keys[row]) for row in range(len(kept))]
    )


def _needs_more(ranked: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Rows whose filters may keep a token beyond the candidates."""
    by_rank = (top_k > 0) & (top_k <= ranked.shape[-1])
    by_share = ranked[:, -1] < min_p * ranked[:, 0]
    by_mass = (top_k == 0) & (min_p == 0.0) & (top_p < 1.0) & (ranked.sum(dim=-1) >= top_p)
    return ~(by_rank | by_share | by_mass)


def _winner(scores: Tensor, tokens: Tensor, key: Tensor) -> Tensor:
    """Return the token whose score and noise are highest. scores, tokens: [candidates]; key: [] int64."""
    return tokens[(scores + noise(key, tokens)).argmax()]


def log_probabilities(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens' log-probabilities [n], and the `num_top` best, [n, num_top] values and ids.

    A vocabulary of fewer tokens gives all of them.
    """
    normalised = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    chosen = normalised.gather(1, tokens[:, None])[:, 0]
    top = normalised.topk(min(num_top, logits.shape[-1]), dim=-1)
    return chosen, top.values, top.indices


def penalise(
    logits: Tensor,
    output_counts: Tensor,
    seen: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> Tensor:
    """Lower the logits of tokens already there.

    Presence and frequency look at the answer, repetition at prompt and answer.
    logits: [n, vocab]; output_counts: [n, vocab] int32; seen: [n, vocab] bool; the rest: [n].
    """
    factor = torch.where(seen, repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - presence[:, None] * (output_counts > 0) - frequency[:, None] * output_counts
