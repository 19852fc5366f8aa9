"""What a sample shows for sure: bounds of a chance and of a quantile, each wrong with at most a stated probability.

All from one inequality, Chernoff's: of n independent trials with chance q, a part of p or further from q is seen with
probability at most exp(-n KL(p, q)). So nothing is assumed of how values are distributed, and any n will do. Knows
nothing of what is measured.
"""

import math
from collections.abc import Callable

_BISECTIONS = 60


def divergence(part: float, chance: float) -> float:
    """Return KL(part, chance) of two coins, in nats."""
    total = 0.0
    for seen, expected in ((part, chance), (1 - part, 1 - chance)):
        if seen > 0:
            if expected <= 0:
                return math.inf
            total += seen * math.log(seen / expected)
    return total


def chance_bounds(num_hits: int, num_trials: int, level: float) -> tuple[float, float]:
    """Return a lower and an upper bound of the chance behind these hits; each is wrong with probability <= level."""
    if num_trials == 0:
        return 0.0, 1.0
    part, room = num_hits / num_trials, -math.log(level) / num_trials
    return _edge(part, 0.0, room), _edge(part, 1.0, room)


def quantile_ranks(num_values: int, quantile: float, level: float) -> tuple[int | None, int | None]:
    """Return the places, from 1, of the sorted values that bound a quantile from below and from above.

    Each is wrong with probability <= level; None where so few values bound nothing.
    """
    needed = -math.log(level)

    def tells(place: int) -> bool:
        return num_values * divergence(place / num_values, quantile) >= needed

    if num_values == 0:
        return None, None
    middle = math.floor(num_values * quantile)
    # How telling a place is rises with its distance from the middle.
    below = _last_true(0, middle, tells)
    above = _last_true(0, num_values - math.ceil(num_values * quantile), lambda steps: tells(num_values - steps))
    return (None if below is None else below + 1), (None if above is None else num_values - above)


def _edge(part: float, end: float, room: float) -> float:
    """Return the chance between `part` and `end` that is as far from `part` as there is room."""
    near, far = part, end
    for _ in range(_BISECTIONS):
        middle = (near + far) / 2
        if divergence(part, middle) > room:
            far = middle
        else:
            near = middle
    return far


def _last_true(first: int, last: int, holds: Callable[[int], bool]) -> int | None:
    """Return the last number for which something holds that holds up to some number and no further."""
    if first > last or not holds(first):
        return None
    while first < last:
        middle = (first + last + 1) // 2
        if holds(middle):
            first = middle
        else:
            last = middle - 1
    return first
