"""Requests of one adapter to few replicas, so that each keeps few adapters loaded; others to the least loaded."""

from collections.abc import Sequence

from penstock.fleet.replica import Replica
from penstock.fleet.router.policies.interface import Choice, Policy
from penstock.fleet.router.policies.least_loaded import LeastLoaded
from penstock.fleet.router.policies.rendezvous import ranked
from penstock.fleet.router.query import RouteQuery

_HOMES = 2  # replicas that an adapter may live on: the less loaded of them is taken


class AdapterAffinity(Policy):
    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        self._others = LeastLoaded()

    def choose(self, query: RouteQuery, candidates: Sequence[Replica]) -> Choice:
        if not query.adapter:
            return self._others.choose(query, candidates)
        homes = ranked(query.adapter, candidates)[:_HOMES]
        chosen = min(homes, key=lambda replica: replica.busyness)
        return Choice(chosen, f"one of the adapter's {len(homes)} replicas")
