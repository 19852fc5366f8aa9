"""The gateway's routing policies as a Ray Serve request router, for callers who come through a handle or Serve's proxy.

Serve's proxy routes before it has read a body, so that of its requests only the session (`x-session-id`) is known; a
handle's are known whole. Knows nothing of how requests are sent.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from penstock.fleet.adapters.interface import Load
from penstock.fleet.config import HealthSection, ReplicaEntry
from penstock.fleet.replica import Replica, ReplicaPool
from penstock.fleet.router.policies.interface import Choice
from penstock.fleet.router.policies.registry import POLICIES
from penstock.fleet.router.query import RequestHead, RouteQuery

_SOURCE = "ray"
_MAX_CHOICES = 16_384  # that are remembered until their requests end: some never tell


class PolicyRouter(RequestRouter):
    """Asks a policy, with what the replicas told of themselves and what this router has sent them."""

    def initialize_state(self, policy: str = "least-loaded") -> None:
        self._policy = POLICIES.load(policy)()
        self._pool = ReplicaPool(HealthSection())
        self._urls: dict[ReplicaID, str] = {}
        self._choices: dict[str, Choice] = {}  # by request, the oldest first

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the policy's choice, and behind it the others, should it refuse."""
        self._urls = {item.replica_id: _url(item) for item in candidate_replicas}
        self._pool.replace(_SOURCE, [ReplicaEntry(url=url) for url in self._urls.values()])
        by_url = {_url(item): item for item in candidate_replicas}
        known = [self._described(item) for item in candidate_replicas]
        if not known:
            return []
        choice = self._policy.choose(query_of(pending_request), known)
        self._remember(pending_request, choice)
        chosen = by_url[choice.replica.url]
        others = [item for item in candidate_replicas if item is not chosen]
        return [[chosen], others] if others else [[chosen]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._count(replica_id, 1)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._count(replica_id, -1)
        self._end(internal_request_id)

    def _remember(self, pending_request: PendingRequest | None, choice: Choice) -> None:
        """Have the policy told when a choice's request ends; at once where nobody would tell."""
        if pending_request is None:
            self._policy.on_end(choice)
            return
        name = pending_request.metadata.internal_request_id
        self._end(name)  # it is chosen for again
        self._choices[name] = choice
        if len(self._choices) > _MAX_CHOICES:
            self._end(next(iter(self._choices)))

    def _end(self, name: str) -> None:
        choice = self._choices.pop(name, None)
        if choice is not None:
            self._policy.on_end(choice)

    def _count(self, replica_id: ReplicaID, change: int) -> None:
        replica = self._pool.find(self._urls.get(replica_id, ""))
        if replica is not None:
            replica.num_in_flight = max(0, replica.num_in_flight + change)

    def _described(self, item: RunningReplica) -> Replica:
        replica = self._pool.find(_url(item))
        assert replica is not None
        if item.routing_stats:
            replica.note_load(msgspec.convert(item.routing_stats, Load))
        return replica


def query_of(pending_request: PendingRequest | None) -> RouteQuery:
    """Return what is known of a request."""
    arguments = () if pending_request is None else (*pending_request.args, *pending_request.kwargs.values())
    body = next((item for item in arguments if isinstance(item, Mapping)), {})
    try:
        head = msgspec.convert({"model": "", **body}, RequestHead)
    except msgspec.ValidationError:  # the server will say what is wrong with it
        head = RequestHead(model="")
    session = None if pending_request is None else pending_request.metadata.session_id or None
    return RouteQuery(head, model=head.model, tenant="", session=session)


def _url(item: RunningReplica) -> str:
    """Return the server's address; where a replica has not told it, a name that is its alone."""
    return str(item.replica_metadata.get("url") or f"http://{item.replica_id.unique_id}")
