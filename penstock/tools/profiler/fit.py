"""From timed steps to the curves of a profile, and how far off those are.

Every cost is a sum of known shapes with unknown weights, so that least squares finds them; errors count relative to
each step's time. Knows nothing of runners.
"""

from bisect import bisect_right
from collections.abc import Sequence
from statistics import median

import numpy as np

from penstock.engine.simulated.profile import Curve, DecodeCost, FitQuality, MixedCost, Profile
from penstock.engine.simulated.step_cost import StepShape, shape_of, step_ms
from penstock.tools.profiler.stopwatch import Timed


def fit_decode(timed: Sequence[Timed], graph_sizes: Sequence[int]) -> DecodeCost:
    """Fit a line over the context for each number of rows."""
    by_rows: dict[int, list[Timed]] = {}
    for item in timed:
        by_rows.setdefault(len(item.step.contexts), []).append(item)
    base: list[float] = []
    slopes: list[float] = []
    for items in by_rows.values():
        shapes = [shape_of(item.step.slices) for item in items]
        table = np.array([[1.0, shape.single_context / 1e3] for shape in shapes])
        weights = _solve(table, np.array([item.ms for item in items]))
        base.append(weights[0])
        # A single context tells nothing of how time grows with it: as for fewer rows.
        slopes.append(weights[1] if len(items) > 1 or not slopes else slopes[-1])
    rows = [float(count) for count in by_rows]
    return DecodeCost(base_ms=_curve(rows, base), context_ms=_curve(rows, slopes), graph_sizes=tuple(graph_sizes))


def fit_mixed(timed: Sequence[Timed], knots: Sequence[int]) -> MixedCost:
    """Fit values at the knots of a step's tokens, and what attention, slices and draws add."""
    shapes = [shape_of(item.step.slices) for item in timed]
    table = np.array([[*_hats(knots, shape.num_tokens), *_extras(shape)] for shape in shapes])
    used = [index for index in range(len(knots)) if table[:, index].any()]
    columns = [*used, *range(len(knots), table.shape[1])]
    weights = _solve(table[:, columns], np.array([item.ms for item in timed]))
    pair_ms, context_ms, slice_ms, row_ms = (_rounded(value) for value in weights[len(used) :])
    return MixedCost(
        base_ms=_curve([float(knots[index]) for index in used], weights[: len(used)]),
        pair_ms=pair_ms,
        context_ms=context_ms,
        slice_ms=slice_ms,
        row_ms=row_ms,
    )


def judge(profile: Profile, timed: Sequence[Timed]) -> FitQuality:
    """Compare a profile with steps that it was not made from."""
    errors = [abs(estimated_ms(profile, item) / item.ms - 1) for item in timed]
    return FitQuality(
        num_steps=len(errors),
        median_error=_rounded(median(errors)),
        p90_error=_rounded(float(np.percentile(errors, 90))),
    )


def estimated_ms(profile: Profile, item: Timed) -> float:
    return step_ms(profile, shape_of(item.step.slices))


def _hats(knots: Sequence[int], place: int) -> list[float]:
    """The share that each knot's value has in a curve at a place."""
    shares = [0.0] * len(knots)
    right = min(max(1, bisect_right(knots, place)), len(knots) - 1)
    if len(knots) == 1 or place <= knots[0]:
        shares[0] = 1.0
        return shares
    share = (place - knots[right - 1]) / (knots[right] - knots[right - 1])
    shares[right - 1], shares[right] = 1.0 - share, share
    return shares


def _extras(shape: StepShape) -> tuple[float, ...]:
    return shape.pairs / 1e6, shape.single_context / 1e3, float(shape.num_slices), float(shape.num_draws)


def _solve(table: np.ndarray, values: np.ndarray) -> list[float]:
    """Return the weights, none below zero, that give the values with the least relative error."""
    weighted = table / values[:, None]
    active = np.ones(table.shape[1], bool)
    while True:
        found = np.zeros(table.shape[1])
        found[active], *_ = np.linalg.lstsq(weighted[:, active], np.ones(len(values)), rcond=None)
        if (found >= 0).all():
            return [float(value) for value in found]
        # A cost cannot be negative: the most negative one is none at all, and the others take its part.
        active[int(found.argmin())] = False


def _curve(places: Sequence[float], values: Sequence[float]) -> Curve:
    return Curve(at=tuple(places), values=tuple(_rounded(value) for value in values))


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
