"""How often beginnings of prompts have been met lately: which prefixes are everybody's, and which are one caller's.

Bounded; the least recently met are forgotten. Knows hashes and moments; nothing of replicas.
"""

import math
from collections import OrderedDict

_MAX_PREFIXES = 20_000


class PrefixHeat:
    """A number for each prefix: 1 for every time it was met, less the longer ago that was."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: after so long a time counts a third."""
        self._seconds = seconds
        self._met: OrderedDict[bytes, tuple[float, float]] = OrderedDict()  # heat, and when that was so

    def meet(self, prefix: bytes, now: float) -> float:
        """Return a prefix's heat before now, and count that it was met."""
        heat, then = self._met.pop(prefix, (0.0, now))
        heat *= math.exp((then - now) / self._seconds)
        self._met[prefix] = (heat + 1.0, now)
        if len(self._met) > _MAX_PREFIXES:
            self._met.popitem(last=False)
        return heat
