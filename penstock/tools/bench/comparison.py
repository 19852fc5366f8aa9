"""Two reports side by side."""

from dataclasses import dataclass

from penstock.tools.bench.document import FIGURES, Report


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of one run in both reports."""

    label: str
    figure: str
    first: float
    second: float
    lower_is_better: bool

    @property
    def ratio(self) -> float:
        return self.second / self.first

    @property
    def gain(self) -> float:
        """Over 1 where the second is better."""
        return 1 / self.ratio if self.lower_is_better else self.ratio


def compare(first: Report, second: Report) -> list[Comparison]:
    """Return every figure over zero that runs of the same label have in both: others have no ratio."""
    others = {run.label: run for run in second.runs}
    pairs = [(run, others[run.label]) for run in first.runs if run.label in others]
    return [
        Comparison(run.label, figure.name, before, after, figure.lower_is_better)
        for run, other in pairs
        for figure in FIGURES
        if (before := figure.of(run) or 0.0) > 0 and (after := figure.of(other) or 0.0) > 0
    ]
