"""The replica with the fewest requests."""

from collections.abc import Sequence

from penstock.fleet.replica import Replica
from penstock.fleet.router.policies.interface import Choice, Policy
from penstock.fleet.router.query import RouteQuery


class LeastLoaded(Policy):
    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        self._turn = 0

    def choose(self, query: RouteQuery, candidates: Sequence[Replica]) -> Choice:
        counts = [replica.busyness for replica in candidates]
        fewest = min(counts)
        # Equals take turns, or an idle fleet's first replica would get everything.
        equals = [replica for replica, count in zip(candidates, counts, strict=True) if count == fewest]
        if len(equals) > 1:
            equals.sort(key=lambda replica: replica.url)
        self._turn += 1
        return Choice(equals[self._turn % len(equals)], f"has {fewest:g} requests, fewest of {len(candidates)}")
