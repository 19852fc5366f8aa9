"""The better of two replicas drawn at random: nearly as even as the least loaded, and several gateways that see the
same old loads do not all choose the same replica."""

from collections.abc import Sequence

from penstock.fleet.replica import Replica
from penstock.fleet.router.policies.interface import Choice, Policy
from penstock.fleet.router.query import RouteQuery


class PowerOfTwo(Policy):
    def choose(self, query: RouteQuery, candidates: Sequence[Replica]) -> Choice:
        drawn = self.random.sample(list(candidates), min(2, len(candidates)))
        chosen = min(drawn, key=lambda replica: replica.busyness)
        return Choice(chosen, f"has {chosen.busyness:g} requests, fewer of {len(drawn)} drawn")
