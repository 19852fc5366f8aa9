"""Log-probabilities that answers tell of their tokens, and how far apart those of two answers are.

Understands the form of chat and that of completions; whatever else a server sends has no scores. Knows nothing of
where answers come from.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec


class Score(NamedTuple):
    """One token of an answer."""

    token: str
    logprob: float | None  # None: its server does not tell, as of the first token of an echoed prompt
    likely: dict[str, float]  # what else was likely in its place


class _Likely(msgspec.Struct):
    token: str
    logprob: float


class _Content(_Likely):
    top_logprobs: list[_Likely] = []


class _Logprobs(msgspec.Struct):
    content: list[_Content] | None = None  # of chat
    tokens: list[str] = []  # of completions: lists with an entry for each token
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


_decoder = msgspec.json.Decoder(_Logprobs | None)


def read_scores(logprobs: bytes) -> list[Score]:
    """Return what a choice's `logprobs` say; nothing where they cannot be understood."""
    try:
        read = _decoder.decode(logprobs)
    except msgspec.DecodeError:
        return []
    if read is None:
        return []
    if read.content is not None:
        return [
            Score(item.token, item.logprob, {other.token: other.logprob for other in item.top_logprobs})
            for item in read.content
        ]
    tops = read.top_logprobs or [None] * len(read.tokens)
    return [Score(*item[:2], item[2] or {}) for item in zip(read.tokens, read.token_logprobs, tops, strict=False)]


def mean_distance(stable: Sequence[Score], candidate: Sequence[Score]) -> float | None:
    """Return the mean of |Δ log-probability| over the tokens that two answers begin with in common.

    And of stable's first other token, as far as the candidate tells what it thinks of that: before it both had seen the
    same. None where there is nothing to compare.
    """
    distances: list[float] = []
    for ours, theirs in zip(stable, candidate, strict=False):
        if ours.logprob is not None and theirs.logprob is not None:
            if ours.token == theirs.token:
                distances.append(abs(ours.logprob - theirs.logprob))
            else:
                distances += _distance_of_other(ours.token, ours.logprob, theirs)
        if ours.token != theirs.token:
            break
    return sum(distances) / len(distances) if distances else None


def _distance_of_other(token: str, logprob: float, theirs: Score) -> list[float]:
    """Return how far the candidate is from stable's score of a token that it did not choose; nothing if it is silent.

    A token that is not among the likely ones is less likely than each of them: then it is at least this far.
    """
    if token in theirs.likely:
        return [abs(logprob - theirs.likely[token])]
    others = [score for name, score in theirs.likely.items() if name != theirs.token]
    return [max(0.0, logprob - min(others))] if others else []
