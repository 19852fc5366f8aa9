"""Each replica in its turn."""

from collections.abc import Sequence

from penstock.fleet.replica import Replica
from penstock.fleet.router.policies.interface import Choice, Policy
from penstock.fleet.router.query import RouteQuery


class RoundRobin(Policy):
    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        self._turn = 0

    def choose(self, query: RouteQuery, candidates: Sequence[Replica]) -> Choice:
        ordered = sorted(candidates, key=lambda replica: replica.url)
        chosen = ordered[self._turn % len(ordered)]
        self._turn += 1
        return Choice(chosen, f"its turn among {len(ordered)}")
