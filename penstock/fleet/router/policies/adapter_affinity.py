"""Requests of one adapter to few replicas, so that each keeps few adapters loaded; others to the least loaded.

An adapter is what `adapter` names, or SGLang's `lora_path` or TGI's `adapter_id`; or the model itself, where replicas
list it as another's adapter, as vLLM does. One that is asked for more than its replicas can bear comes to live on more.
"""

from collections.abc import Sequence

from penstock.fleet.replica import Replica
from penstock.fleet.router.policies.interface import Choice, Policy
from penstock.fleet.router.policies.least_loaded import LeastLoaded
from penstock.fleet.router.policies.rendezvous import most_requests, ranked
from penstock.fleet.router.query import RouteQuery

_HOMES = 2  # replicas that an adapter may live on: the less loaded of them is taken


class AdapterAffinity(Policy):
    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        self._others = LeastLoaded()

    def choose(self, query: RouteQuery, candidates: Sequence[Replica]) -> Choice:
        adapter = _adapter_of(query, candidates)
        if not adapter:
            return self._others.choose(query, candidates)
        order, bound = ranked(adapter, candidates), most_requests(candidates)
        homes = order[:_HOMES]
        for replica in order[_HOMES:]:
            if min(home.busyness for home in homes) <= bound:
                break
            homes.append(replica)
        chosen = min(homes, key=lambda replica: replica.busyness)
        return Choice(chosen, f"one of the adapter's {len(homes)} replicas")


def _adapter_of(query: RouteQuery, candidates: Sequence[Replica]) -> str:
    if query.adapter:
        return query.adapter
    return query.model if any(replica.has_adapter(query.model) for replica in candidates) else ""
