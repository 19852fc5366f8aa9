"""What the engine counts and times about itself. Plain numbers; Prometheus is the server's business."""

from bisect import bisect_left, insort
from collections import deque
from itertools import accumulate

from penstock.engine.messages import Histogram
from penstock.request import FinishReason

LATENCY_BOUNDS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0]
TOKEN_BOUNDS = [0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0]

# Why a request is refused before it costs anything, and what is promised to one that is not.
REFUSALS = ("queue_full", "ttft", "time_per_token", "deadline", "unreachable")
PROMISES = ("ttft", "time_per_token", "deadline")
PREDICTION_WINDOW = 200


class QuantileWindow:
    """The last so many values, in order of size."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._recent: deque[float] = deque()
        self._ordered: list[float] = []

    def add(self, value: float) -> None:
        self._recent.append(value)
        insort(self._ordered, value)
        if len(self._recent) > self._size:
            del self._ordered[bisect_left(self._ordered, self._recent.popleft())]

    def __len__(self) -> int:
        return len(self._ordered)

    @property
    def median(self) -> float | None:
        return self.quantile(0.5)

    def quantile(self, part: float) -> float | None:
        """The value that this part of them is below; None where there is none yet."""
        return self._ordered[int(part * len(self._ordered))] if self._ordered else None


class Distribution:
    """Observations counted into fixed buckets."""

    def __init__(self, bounds: list[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> Histogram:
        return Histogram(self._bounds, list(accumulate(self._counts)), self._total)


class EngineMetrics:
    """Counters since start, written by the scheduler and the engine loop."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.last_step_monotonic: float | None = None
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.work_seconds = 0.0  # what online requests' tokens cost, beyond what every step costs anyway
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self.num_preemptions = 0
        self.num_refused = dict.fromkeys(REFUSALS, 0)
        self.promises = {kind: {"kept": 0, "broken": 0} for kind in PROMISES}
        self.ttft_error = QuantileWindow(PREDICTION_WINDOW)
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.num_finished = {reason.value: 0 for reason in FinishReason}
        self.ttft = Distribution(LATENCY_BOUNDS)
        self.time_per_token = Distribution(TOKEN_BOUNDS)
        self.e2e = Distribution(LATENCY_BOUNDS)
        self.queue = Distribution(LATENCY_BOUNDS)
        self.step = Distribution(TOKEN_BOUNDS)

    def histograms(self) -> dict[str, Histogram]:
        return {
            "ttft_seconds": self.ttft.snapshot(),
            "time_per_output_token_seconds": self.time_per_token.snapshot(),
            "e2e_seconds": self.e2e.snapshot(),
            "queue_seconds": self.queue.snapshot(),
            "step_seconds": self.step.snapshot(),
        }
