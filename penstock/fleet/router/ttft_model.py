"""How long a replica takes to a first token, learnt from the requests that were answered.

    seconds = fixed + uncached tokens + what attention reads for them + tokens on the host + requests that decode beside

The tokens are those of the prompt and of the prompts before it that are not done: what is not cached is computed, and
what only the host's memory has is copied to the device. No coefficient is below zero, and older requests count less.
Knows numbers only; nothing of replicas or time.
"""

from dataclasses import dataclass

_MEMORY = 0.99  # each request weighs this much less than the one after it
_INERTIA = 1e-3  # keeps a coefficient where it was while nothing tells anything about it
_SWEEPS = 8
# Errors are judged in parts of the expected time, but of no less than this.
_SHORTEST_SECONDS = 0.005
_MOST_SURPRISE = 4.0  # times the expected: what took longer counts as that
# What a small model on a middling device takes, until something was seen.
_FIRST_GUESS = (0.02, 0.1, 0.001, 0.01, 0.001)
_UNITS = (1.0, 1e-3, 1e-6, 1e-3, 1.0)  # seconds; per thousand tokens; per million pairs; as tokens; per request


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """What there is to compute before a first token."""

    tokens: float = 0.0  # not cached
    pairs: float = 0.0  # over these, the tokens that each looks at
    copied: float = 0.0  # tokens that are cached, but not on the device

    def plus(self, other: "PrefillWork", share: float = 1.0) -> "PrefillWork":
        return PrefillWork(
            self.tokens + share * other.tokens,
            self.pairs + share * other.pairs,
            self.copied + share * other.copied,
        )


def prefill_work(num_prompt_tokens: float, num_cached_tokens: float, num_on_host: float = 0.0) -> PrefillWork:
    """`num_on_host`: of the cached tokens, how many must be copied to the device."""
    tokens = max(0.0, num_prompt_tokens - num_cached_tokens)
    return PrefillWork(tokens, tokens * (num_prompt_tokens - tokens / 2), min(num_on_host, num_cached_tokens))


class TtftModel:
    """Least squares of relative errors."""

    def __init__(self) -> None:
        self._coefficients = list(_FIRST_GUESS)
        self._gram = [[0.0] * len(_UNITS) for _ in _UNITS]
        self._target = [0.0] * len(_UNITS)

    def seconds(self, work: PrefillWork, num_decoding: float) -> float:
        """Return the time to a first token behind so much work, beside so many requests that decode."""
        features = _features(work, num_decoding)
        return sum(feature * each for feature, each in zip(features, self._coefficients, strict=True))

    def work_seconds(self, work: PrefillWork) -> float:
        """Return how long the work alone keeps a replica busy."""
        return self.compute_seconds(work) + self._coefficients[3] * work.copied * _UNITS[3]

    def compute_seconds(self, work: PrefillWork) -> float:
        """Return how long that part of it takes that is not copied but computed."""
        return self._coefficients[1] * work.tokens * _UNITS[1] + self._coefficients[2] * work.pairs * _UNITS[2]

    def observe(self, work: PrefillWork, num_decoding: float, seconds: float) -> None:
        """Learn from a request that was answered."""
        expected = self.seconds(work, num_decoding)
        scale = 1.0 / max(expected, _SHORTEST_SECONDS)
        # One request that waited for something else must not change what all others are expected to take.
        seconds = min(seconds, _MOST_SURPRISE * max(expected, _SHORTEST_SECONDS))
        features = [feature * scale for feature in _features(work, num_decoding)]
        for row, own in zip(self._gram, features, strict=True):
            for index, other in enumerate(features):
                row[index] = _MEMORY * row[index] + own * other
        self._target = [
            _MEMORY * value + own * seconds * scale for value, own in zip(self._target, features, strict=True)
        ]
        self._solve()

    def _solve(self) -> None:
        values = self._coefficients
        anchors = list(values)
        for _ in range(_SWEEPS):
            for index, row in enumerate(self._gram):
                rest = sum(each * value for each, value in zip(row, values, strict=True)) - row[index] * values[index]
                wanted = self._target[index] - rest + _INERTIA * anchors[index]
                values[index] = max(0.0, wanted / (row[index] + _INERTIA))


def _features(work: PrefillWork, num_decoding: float) -> tuple[float, float, float, float, float]:
    return 1.0, work.tokens * _UNITS[1], work.pairs * _UNITS[2], work.copied * _UNITS[3], num_decoding
