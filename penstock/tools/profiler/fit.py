"""From timed steps to the curves of a profile, and how far off those are.

Every cost is a sum of known shapes with unknown weights, so that least squares finds them; errors count relative to
each step's time. Knows nothing of runners.
"""

from bisect import bisect_right
from collections.abc import Sequence
from statistics import median

import numpy as np

from penstock.engine.simulated.profile import Curve, DecodeCost, FitQuality, MixedCost, Profile
from penstock.engine.simulated.step_cost import StepWork, captured_size, step_ms, work_of
from penstock.tools.profiler.steps import Limits, row_knots, token_knots
from penstock.tools.profiler.stopwatch import Timed

# Draws are a small part of a step, so every third number of rows is knot enough.
_DRAW_KNOTS_EVERY = 3


def fit_decode(timed: Sequence[Timed], limits: Limits) -> DecodeCost:
    """Fit a line over the context for each number of rows."""
    by_rows: dict[int, list[Timed]] = {}
    for item in timed:
        by_rows.setdefault(len(item.step.contexts), []).append(item)
    base: list[float] = []
    slopes: list[float] = []
    for items in by_rows.values():
        shapes = [work_of(item.step.slices) for item in items]
        table = np.array([[1.0, shape.single_context / 1e3] for shape in shapes])
        weights = _solve(table, np.array([item.ms for item in items]))
        base.append(weights[0])
        # A single context tells nothing of how time grows with it: as for fewer rows.
        slopes.append(weights[1] if len(items) > 1 or not slopes else slopes[-1])
    rows = [float(count) for count in by_rows]
    return DecodeCost(base_ms=_curve(rows, base), context_ms=_curve(rows, slopes), graph_sizes=limits.graph_sizes)


def fit_mixed(timed: Sequence[Timed], limits: Limits) -> MixedCost:
    """Fit values at the knots of a step's tokens and draws, and what attention and slices add."""
    shapes = [work_of(item.step.slices) for item in timed]
    knots, draw_knots = token_knots(limits), [1, *row_knots(limits)[_DRAW_KNOTS_EVERY::_DRAW_KNOTS_EVERY]]
    sizes = np.array([_hats(knots, captured_size(limits.graph_tokens, shape.num_tokens)) for shape in shapes])
    # What one draw costs is part of the base.
    drawn = np.array([_hats(draw_knots, max(1, shape.num_draws))[1:] for shape in shapes])
    others = np.array([_extras(shape) for shape in shapes])
    seen_sizes, seen_draws = _seen(sizes), _seen(drawn)
    table = np.hstack([sizes[:, seen_sizes], drawn[:, seen_draws], others])
    weights = _solve(table, np.array([item.ms for item in timed]))
    pair_ms, context_ms, slice_ms = (_rounded(value) for value in weights[-others.shape[1] :])
    draw_ms = [0.0, *weights[len(seen_sizes) : -others.shape[1]]]
    return MixedCost(
        base_ms=_curve([float(knots[index]) for index in seen_sizes], weights[: len(seen_sizes)]),
        pair_ms=pair_ms,
        context_ms=context_ms,
        slice_ms=slice_ms,
        draw_ms=_curve([1.0, *(float(draw_knots[index + 1]) for index in seen_draws)], draw_ms),
        graph_tokens=limits.graph_tokens,
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
    return step_ms(profile, work_of(item.step.slices))


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


def _seen(table: np.ndarray) -> list[int]:
    """The columns that any step says something about."""
    return [index for index in range(table.shape[1]) if table[:, index].any()]


def _extras(shape: StepWork) -> tuple[float, ...]:
    return shape.pairs / 1e6, shape.single_context / 1e3, float(shape.num_slices)


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
