"""How much slower one version answers than another, by windows of time.

Whatever slows a machine slows both versions' answers in the same window, so only those are compared; and since answers
of one moment share its luck, a window tells one ratio, however many answers it holds. Knows nothing of what follows
from the ratios; moments are the answers' own.
"""

from penstock.fleet.rollout.evidence import MEDIAN, TAIL, Evidence, Histogram
from penstock.fleet.rollout.trial import Trial

# Answers of each version that a window needs: any number has a median, but few have a tail.
_LEAST_VALUES, _LEAST_TAIL_VALUES = 1, 8


class Windows:
    """The windows that are open in one step of a rollout; what those that close tell goes into its evidence."""

    def __init__(self, evidence: Evidence, seconds: float) -> None:
        self._ttft = [
            _Window(MEDIAN, _LEAST_VALUES, seconds, evidence.ttft_ratio),
            _Window(TAIL, _LEAST_TAIL_VALUES, seconds, evidence.ttft_tail_ratio),
        ]
        self._time_per_token = [
            _Window(MEDIAN, _LEAST_VALUES, seconds, evidence.time_per_token_ratio),
            _Window(TAIL, _LEAST_TAIL_VALUES, seconds, evidence.time_per_token_tail_ratio),
        ]

    def add(self, answer: Trial, *, is_candidate: bool) -> None:
        """Take an answer in, at the moment it ended. One that failed has no times."""
        if answer.ended_at is None or answer.has_failed or answer.was_hindered:
            return
        for windows, value in (
            (self._ttft, answer.ttft_seconds),
            (self._time_per_token, answer.time_per_token_seconds()),
        ):
            if value is not None and value > 0:
                for window in windows:
                    window.add(answer.ended_at, value, is_candidate=is_candidate)


class _Window:
    """One after the other: each lasts so long, and on until it holds enough of both versions."""

    def __init__(self, part: float, least_values: int, seconds: float, ratios: Histogram) -> None:
        self._part = part
        self._least_values = least_values
        self._seconds = seconds
        self._ratios = ratios
        self._began_at: float | None = None
        self._stable, self._candidate = Histogram(), Histogram()

    def add(self, moment: float, value: float, *, is_candidate: bool) -> None:
        if self._began_at is None:
            self._began_at = moment
        if moment - self._began_at >= self._seconds and self._is_enough():
            self._close()
            self._began_at = moment
        (self._candidate if is_candidate else self._stable).add(value)

    def _is_enough(self) -> bool:
        return min(self._stable.num_values, self._candidate.num_values) >= self._least_values

    def _close(self) -> None:
        stable, candidate = self._stable.quantile(self._part), self._candidate.quantile(self._part)
        assert stable is not None and candidate is not None
        self._ratios.add(candidate / stable)
        self._stable, self._candidate = Histogram(), Histogram()
