"""Replicas that come and go in virtual time, and before them what a gateway has: its pool and one of its policies.

The gateway's own `ReplicaPool`, `Replica` and policies, fed as its health monitor feeds them. Knows nothing of
workloads or measurements.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from penstock.engine.messages import EngineStats, TokenEvent
from penstock.fleet.adapters.interface import Load, ServedModel
from penstock.fleet.cached_blocks import CachedBlocks
from penstock.fleet.config import HealthSection, ReplicaEntry
from penstock.fleet.replica import Replica, ReplicaPool
from penstock.fleet.router.policies.interface import Choice, Policy
from penstock.fleet.router.policies.registry import POLICIES
from penstock.fleet.router.query import RouteQuery
from penstock.protocol.prompt_note import PromptNote
from penstock.tools.simulator.agenda import Agenda
from penstock.tools.simulator.replica import VirtualReplica
from penstock.tools.simulator.server import SimulatedServer

MODEL = "simulated"
_SOURCE = "simulator"


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a request went."""

    replica: VirtualReplica
    choice: Choice
    sent: float


class VirtualFleet:
    """All replicas of a simulation, those that have ended included."""

    def __init__(self, server: SimulatedServer, agenda: Agenda) -> None:
        self.server = server
        self.pool = ReplicaPool(HealthSection(), clock=lambda: agenda.now)
        self.replicas: list[VirtualReplica] = []  # starting, ready or draining
        self.ended: list[VirtualReplica] = []
        self.num_held = 0  # requests that wait for a first replica
        self._agenda = agenda
        self._policy: Policy = POLICIES.load(server.policy)(seed=0)
        self._by_url: dict[str, VirtualReplica] = {}
        self._known: dict[VirtualReplica, Replica] = {}
        self._num_started = 0
        config = server.config
        self._kv_tokens = config.block_tokens * (config.num_blocks - 1 + config.num_host_slots)
        for _ in range(server.num_replicas):
            self.start_replica()

    @property
    def now(self) -> float:
        return self._agenda.now

    @property
    def num_starting(self) -> int:
        return sum(item.ready_at > self.now and not item.is_draining for item in self.replicas)

    @property
    def num_ready(self) -> int:
        """Replicas that take requests now."""
        return sum(item.ready_at <= self.now and not item.is_draining for item in self.replicas)

    @property
    def replica_seconds(self) -> float:
        """What has been paid for until now: every replica from its start to its end."""
        return sum(item.seconds_until(self.now) for item in (*self.replicas, *self.ended))

    def start_replica(self, ready_after_seconds: float = 0.0) -> VirtualReplica:
        """Begin to pay for another replica; it takes requests when it is ready."""
        name = f"replica-{self._num_started}"
        self._num_started += 1
        replica = VirtualReplica(self.server, name, self.now, self.now + ready_after_seconds)
        self.replicas.append(replica)
        if ready_after_seconds > 0:
            self._agenda.add(replica.ready_at, lambda: self._join(replica))
        else:
            self._join(replica)
        return replica

    def drain_replica(self, replica: VirtualReplica) -> None:
        """Send a replica no more requests; it ends with the last of those it has."""
        replica.is_draining = True
        self.pool.remove(_SOURCE, _url(replica), "it drains")
        self._end_drained(replica)

    def known(self, replica: VirtualReplica) -> Replica | None:
        """What the gateway knows of a replica; None for one that is not there yet."""
        return self._known.get(replica)

    def place(self, query: RouteQuery, avoid: Collection[VirtualReplica] = ()) -> Placed | None:
        """Have the policy choose, and count the request as in flight there. None where nobody can take it."""
        candidates = [
            known
            for known in self.pool.serving(MODEL)
            if known.is_usable and not known.is_full and self._by_url[known.url] not in avoid
        ]
        if not candidates:
            return None
        choice = self._policy.choose(query, candidates)
        choice.replica.num_in_flight += 1
        return Placed(self._by_url[choice.replica.url], choice, self.now)

    def note_first_token(self, placed: Placed, note: PromptNote | None) -> None:
        """Take that a request's first token has come."""
        self._policy.on_first_byte(placed.choice, self.now - placed.sent, note)

    def release(self, placed: Placed) -> None:
        """Take that a request has ended there."""
        placed.choice.replica.num_in_flight -= 1
        self._policy.on_end(placed.choice)
        self._end_drained(placed.replica)

    def furthest_behind(self) -> VirtualReplica | None:
        """Return the replica whose step comes next."""
        busy = (item for item in self.replicas if item.has_work)
        return min(busy, key=lambda item: item.next_step_at, default=None)

    def step(self, replica: VirtualReplica) -> list[TokenEvent]:
        """Run one of a replica's steps; the gateway hears of its blocks when it has ended."""
        events = replica.step()
        changes, known = replica.take_block_changes(), self._known[replica]
        if changes is not None and known.blocks is not None:
            self._agenda.add(replica.clock.now(), partial(known.blocks.apply, changes))
        return events

    def probe(self) -> None:
        """Learn every replica's load, as the gateway's health monitor does."""
        for replica in self.replicas:
            known = self.known(replica)
            if known is not None:
                known.note_load(load_of(replica.stats, self._kv_tokens))

    def _join(self, replica: VirtualReplica) -> None:
        if replica.is_draining:
            return
        known = self.pool.add(_SOURCE, ReplicaEntry(url=_url(replica)))
        known.models = (ServedModel(MODEL, self.server.config.max_context_tokens),)
        known.breaker.on_probe(True)
        if self._policy.uses_blocks:
            known.blocks = CachedBlocks(replica.watch_blocks())
        self._by_url[known.url], self._known[replica] = replica, known

    def _end_drained(self, replica: VirtualReplica) -> None:
        known = self._known.get(replica)
        num_in_flight = 0 if known is None else known.num_in_flight
        if replica.is_draining and not num_in_flight and replica.ended_at is None:
            replica.ended_at = self.now
            self.replicas.remove(replica)
            self.ended.append(replica)


def load_of(stats: EngineStats, kv_tokens: int) -> Load:
    """Return what a gateway would read from the replica's metrics."""
    return Load(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        kv_utilization=stats.num_used_blocks / stats.num_blocks,
        queue_seconds=stats.queue_seconds,
        work_seconds=stats.work_seconds,
        prompt_tokens=stats.prompt_tokens,
        generated_tokens=stats.generated_tokens,
        num_kept=sum(outcomes["kept"] for outcomes in stats.promises.values()),
        num_missed=sum(outcomes["broken"] for outcomes in stats.promises.values())
        + sum(count for reason, count in stats.num_refused.items() if reason != "unreachable"),
        kv_tokens=kv_tokens,
    )


def _url(replica: VirtualReplica) -> str:
    return f"http://{replica.name}"
