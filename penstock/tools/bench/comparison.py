"""Two reports side by side."""

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.tools.bench.document import FIGURES, Figure, Report, Run

FAILED = "failed requests, %"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of one run in both reports. None: no request gave it."""

    label: str
    figure: str
    first: float | None
    second: float | None
    lower_is_better: bool

    @property
    def has_ratio(self) -> bool:
        return bool(self.first and self.second)

    @property
    def ratio(self) -> float:
        assert self.first and self.second
        return self.second / self.first

    @property
    def gain(self) -> float:
        """Over 1 where the second is better; 0 or infinite where there is no ratio."""
        if self.has_ratio:
            return 1 / self.ratio if self.lower_is_better else self.ratio
        first_is_worst = self.first is None or (not self.first and not self.lower_is_better)
        second_is_best = self.second is not None and not self.second and self.lower_is_better
        return float("inf") if first_is_worst or second_is_best else 0.0


def common_labels(first: Report, second: Report) -> list[str]:
    """Return the labels of the runs that both have."""
    others = {run.label for run in second.runs}
    return [run.label for run in first.runs if run.label in others]


def compare(first: Report, second: Report) -> list[Comparison]:
    """Return every figure of the runs with the same label that one of them has at least, and where requests failed."""
    others = {run.label: run for run in second.runs}
    pairs = [(run, others[run.label]) for run in first.runs if run.label in others]
    return [item for run, other in pairs for item in _compare_runs(run, other)]


def _compare_runs(run: Run, other: Run) -> Iterator[Comparison]:
    if run.errors or other.errors:
        yield Comparison(run.label, FAILED, _failed_percent(run), _failed_percent(other), lower_is_better=True)
    for figure in FIGURES:
        before, after = figure.of(run), figure.of(other)
        if _is_comparable(figure, before, after):
            if not figure.lower_is_better:
                before, after = before or 0.0, after or 0.0
            yield Comparison(run.label, figure.name, before, after, figure.lower_is_better)


def _is_comparable(figure: Figure, before: float | None, after: float | None) -> bool:
    if not before and not after:
        return False
    if figure.is_optional and (before is None or after is None):
        return False
    # A latency that is not over zero is damage.
    return not figure.lower_is_better or all(value is None or value > 0 for value in (before, after))


def _failed_percent(run: Run) -> float:
    return 100 * sum(run.errors.values()) / max(run.num_requests, 1)
