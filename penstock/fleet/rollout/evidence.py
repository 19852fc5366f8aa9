"""What was seen of two versions in one step of a rollout: counts and histograms that add up across gateways.

Bounded however much is seen. Knows nothing of what follows from it.
"""

import enum
import math

import msgspec

MEDIAN, TAIL = 0.5, 0.9  # what is told of times
# A value is known to within one part in a hundred.
_WIDTH = math.log(1.01)
_SMALLEST, _LARGEST = 1e-6, 1e6


class Histogram(msgspec.Struct, forbid_unknown_fields=True):
    """Positive values, by how many fell between two edges one hundredth apart."""

    counts: dict[int, int] = {}

    def add(self, value: float) -> None:
        place = math.floor(math.log(min(max(value, _SMALLEST), _LARGEST)) / _WIDTH)
        self.counts[place] = self.counts.get(place, 0) + 1

    @property
    def num_values(self) -> int:
        return sum(self.counts.values())

    def edges(self, rank: int) -> tuple[float, float]:
        """Return between which edges the value of this rank lies; the smallest has rank 1."""
        passed = 0
        for place in sorted(self.counts):
            passed += self.counts[place]
            if passed >= rank:
                return math.exp(place * _WIDTH), math.exp((place + 1) * _WIDTH)
        raise ValueError(f"there are {passed} values, and none of rank {rank}")

    def quantile(self, part: float) -> float | None:
        """Return a quantile as near as it is known; None of nothing.

        Of few values too it is as often too high as too low, so that samples of different sizes can be compared.
        """
        if not self.counts:
            return None
        num_values = self.num_values
        place = min(max(part * (num_values + 1 / 3) + 1 / 3, 1.0), float(num_values))
        below, above = math.floor(place), math.ceil(place)
        weight = place - below
        return math.pow(self._value(below), 1 - weight) * math.pow(self._value(above), weight)

    def _value(self, rank: int) -> float:
        lower, upper = self.edges(rank)
        return math.sqrt(lower * upper)

    def merge(self, other: "Histogram") -> None:
        for place, count in other.counts.items():
            self.counts[place] = self.counts.get(place, 0) + count


class Arm(msgspec.Struct, forbid_unknown_fields=True):
    """One version's requests."""

    requests: int = 0
    errors: int = 0
    ttft: Histogram = msgspec.field(default_factory=Histogram)  # seconds
    time_per_token: Histogram = msgspec.field(default_factory=Histogram)  # seconds

    def merge(self, other: "Arm") -> None:
        self.requests += other.requests
        self.errors += other.errors
        self.ttft.merge(other.ttft)
        self.time_per_token.merge(other.time_per_token)


class Loss(enum.StrEnum):
    """Why a copy of a request told nothing."""

    KEY = "key"
    FULL = "full"
    CROWD = "crowd"
    NO_REPLICA = "no_replica"


_LOSSES = {
    Loss.KEY: "refused for the gateway's key: the replicas' key_file must hold one with admin = true",
    Loss.FULL: "refused by a replica that was full",
    Loss.CROWD: "not sent: too many were under way (max_shadows)",
    Loss.NO_REPLICA: "not sent: no replica of the version could take one",
}


class Evidence(msgspec.Struct, forbid_unknown_fields=True):
    """All that one step of a rollout has shown."""

    stable: Arm = msgspec.field(default_factory=Arm)
    candidate: Arm = msgspec.field(default_factory=Arm)
    # The candidate's times over the stable version's, of answers of the same window of time: one value a window. The
    # medians' ratios, and the 90th percentiles'.
    ttft_ratio: Histogram = msgspec.field(default_factory=Histogram)
    ttft_tail_ratio: Histogram = msgspec.field(default_factory=Histogram)
    time_per_token_ratio: Histogram = msgspec.field(default_factory=Histogram)
    time_per_token_tail_ratio: Histogram = msgspec.field(default_factory=Histogram)
    compared_answers: int = 0
    compared_tokens: int = 0  # up to and with the first that differed
    divergences: int = 0  # answers in which one did
    # Of answers that both tell log-probabilities of: how far apart those of their tokens are, in the mean, in nats.
    logprob_distance: Histogram = msgspec.field(default_factory=Histogram)
    lost_copies: dict[Loss, int] = {}

    def lose(self, loss: Loss, count: int = 1) -> None:
        self.lost_copies[loss] = self.lost_copies.get(loss, 0) + count

    @property
    def losses(self) -> str:
        """How many copies told nothing, and why; empty where all did."""
        if not self.lost_copies:
            return ""
        total = sum(self.lost_copies.values())
        told = [f"{self.lost_copies[loss]} {text}" for loss, text in _LOSSES.items() if loss in self.lost_copies]
        return f"{total} copies of requests told nothing: {'; '.join(told)}"

    def merge(self, other: "Evidence") -> None:
        self.stable.merge(other.stable)
        self.candidate.merge(other.candidate)
        self.ttft_ratio.merge(other.ttft_ratio)
        self.ttft_tail_ratio.merge(other.ttft_tail_ratio)
        self.time_per_token_ratio.merge(other.time_per_token_ratio)
        self.time_per_token_tail_ratio.merge(other.time_per_token_tail_ratio)
        self.compared_answers += other.compared_answers
        self.compared_tokens += other.compared_tokens
        self.divergences += other.divergences
        self.logprob_distance.merge(other.logprob_distance)
        for loss, count in other.lost_copies.items():
            self.lose(loss, count)


def merged(parts: list[Evidence]) -> Evidence:
    whole = Evidence()
    for part in parts:
        whole.merge(part)
    return whole
