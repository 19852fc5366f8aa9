"""The better of two replicas drawn at random: nearly as even as the least loaded, and several gateways that see the
same old loads do not all choose the same replica."""

import random
from collections.abc import Sequence

from penstock.fleet.replica import Replica
from penstock.fleet.router.policies.interface import Choice, Policy
from penstock.fleet.router.query import RouteQuery


class PowerOfTwo(Policy):
    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(self, query: RouteQuery, candidates: Sequence[Replica]) -> Choice:
        drawn = self._random.sample(list(candidates), min(2, len(candidates)))
        chosen = min(drawn, key=lambda replica: replica.busyness)
        return Choice(chosen, f"has {chosen.busyness:g} requests, fewer of {len(drawn)} drawn")
