"""Requests of one session to one replica, which then has the conversation in its cache.

A session is what the header `x-session-id`, `prompt_cache_key` or `user` names, or how the conversation began.
"""

from collections.abc import Sequence

from penstock.fleet.replica import Replica
from penstock.fleet.router.policies.interface import Choice, Policy
from penstock.fleet.router.policies.rendezvous import most_requests, ranked
from penstock.fleet.router.query import RouteQuery


class SessionAffinity(Policy):
    def choose(self, query: RouteQuery, candidates: Sequence[Replica]) -> Choice:
        bound = most_requests(candidates)
        order = ranked(f"{query.tenant}\0{query.session}", candidates)
        for place, replica in enumerate(order):
            if replica.busyness <= bound:
                return Choice(
                    replica, "the session's replica" if place == 0 else f"the session's replica no. {place + 1}"
                )
        return Choice(order[0], "the session's replica")
