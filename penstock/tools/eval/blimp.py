"""Minimal pairs: sentences that differ in one point of grammar; the model should find the right one likelier.

Log-probabilities decide, so that a small loss of accuracy shows even with a small model. Knows nothing of how
sentences are tokenised or scored. The file format is that of the BLiMP data set: one JSON object per line.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.tools.eval.perplexity import Score


@dataclass(frozen=True, slots=True)
class MinimalPair:
    good: str
    bad: str


@dataclass(frozen=True, slots=True)
class PairScores:
    """Log-probabilities of one pair's sentences."""

    good: float
    bad: float

    @property
    def is_right(self) -> bool:
        return self.good > self.bad


def read_pairs(file: Path, max_pairs: int | None = None) -> list[MinimalPair]:
    """Read `sentence_good` and `sentence_bad` of every line."""
    pairs: list[MinimalPair] = []
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            if max_pairs is not None and len(pairs) == max_pairs:
                break
            fields = json.loads(line)
            pairs.append(MinimalPair(fields["sentence_good"], fields["sentence_bad"]))
    return pairs


def score_pairs(
    pairs: Sequence[MinimalPair], encode: Callable[[str], list[int]], score: Score, *, start_token_id: int
) -> list[PairScores]:
    """Score both sentences of every pair, whole, each after the start token."""
    sentences = [text for pair in pairs for text in (pair.good, pair.bad)]
    scored = score([[start_token_id, *encode(text)] for text in sentences])
    totals = [math.fsum(logprobs) for logprobs in scored]
    return [PairScores(good, bad) for good, bad in zip(totals[0::2], totals[1::2], strict=True)]


def accuracy(scores: Sequence[PairScores]) -> float:
    """The share of pairs that the model gets right, from 0 to 1."""
    return sum(pair.is_right for pair in scores) / len(scores)
