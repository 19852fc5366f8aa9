"""Finds each request its replica: by the model's policy, at once or after a wait.

Tells a full fleet (429) from one that is not there (503). Knows nothing of HTTP.
"""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from penstock.errors import EngineUnavailable, Overloaded, UnknownModel
from penstock.fleet.config import FleetConfig
from penstock.fleet.replica import Replica, ReplicaPool
from penstock.fleet.rollout.split import VersionSplit
from penstock.fleet.router.forecast import Forecast, PlaceKind, Want
from penstock.fleet.router.policies.interface import Choice, Policy
from penstock.fleet.router.policies.registry import POLICIES
from penstock.fleet.router.query import RouteQuery
from penstock.fleet.router.urgency import PLAIN, Urgency
from penstock.fleet.router.waiting_room import RoomFull, WaitingRoom
from penstock.protocol.prompt_note import PromptNote

# That a replica is left alone which says that it is full: it may say so again and again, and be wrong for an hour.
_LEAST_FULL_SECONDS, _MOST_FULL_SECONDS = 0.1, 30.0


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request wants of its replica."""

    query: RouteQuery
    urgency: Urgency = PLAIN
    avoid: Collection[str] = ()  # URLs of replicas that failed it; taken again only where there is no other
    must_frame: bool = False  # it can only go on with an answer that another began
    counted_here: bool = (
        False  # such an answer is, by the gateway; whoever goes on with it must be as well, or must not
    )


class Placement:
    """A request's place on a replica. Release it once, when the request has ended there."""

    def __init__(self, dispatcher: "Dispatcher", choice: Choice, lane: "_Lane", max_tokens: int | None) -> None:
        self.choice = choice
        self.replica: Replica = choice.replica
        self.policy = lane.policy_name
        self._began = choice.replica.clock()
        self._lane = lane
        self._dispatcher = dispatcher
        self._kind = _kind_of(self.replica)
        self.is_answered = False  # by the replica, be it with a mistake of the caller's
        self._is_held = True
        lane.forecast.note_begin(self._kind, self, self._began, max_tokens)
        self.replica.num_in_flight += 1

    def note_first_byte(self, note: PromptNote | None, *, is_first_token: bool) -> None:
        """Tell the policy that the replica answers: with a first token, or with something that says nothing of one."""
        seconds = self.replica.clock() - self._began if is_first_token else None
        self._lane.policy.on_first_byte(self.choice, seconds, note)

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            lane, now = self._lane, self.replica.clock()
            lane.forecast.note_end(self._kind, self, now, lane.room.wants, is_answered=self.is_answered)
            lane.policy.on_end(self.choice)
            self.replica.num_in_flight -= 1
            self._dispatcher.call_waiting()


class _Lane:
    """One model's policy and waiting requests."""

    def __init__(self, policy: str, max_per_tenant: int) -> None:
        self.policy_name = policy
        self.policy: Policy = POLICIES.load(policy)()
        self.room: WaitingRoom[Placement, Want] = WaitingRoom(max_per_tenant)
        self.forecast = Forecast()


class Dispatcher:
    def __init__(self, config: FleetConfig, pool: ReplicaPool, split: VersionSplit | None = None) -> None:
        self._config = config
        self._pool = pool
        self._split = split if split is not None else VersionSplit(config.rollouts)
        self._lanes: dict[str, _Lane] = {}
        self._troubles: dict[str, str] = {}  # by model: why no replica of it comes

    @property
    def max_wait_seconds(self) -> float:
        """How long a request may be kept from a replica that is full."""
        return self._config.queue.max_wait_seconds

    @property
    def num_waiting(self) -> int:
        return sum(len(lane.room) for lane in self._lanes.values())

    def counts_nowhere(self, model: str) -> bool:
        """Whether every replica of a model is one that does not count usage itself."""
        replicas = self._pool.serving(model)
        return bool(replicas) and all(replica.is_counted_here for replica in replicas)

    def max_context_tokens(self, model: str) -> int | None:
        """Return the longest context of a model, as far as its replicas tell."""
        served = self._pool.models().get(model)
        return served.max_context_tokens if served is not None else None

    def num_waiting_for(self, model: str) -> int:
        lane = self._lanes.get(model)
        return 0 if lane is None else len(lane.room)

    async def acquire(self, wish: Wish) -> Placement:
        """Return a place for a request. Raises UnknownModel (of all names), Overloaded or EngineUnavailable."""
        lane = self._lane(wish.query.model)
        # Who comes now may not pass those who wait: what they leave none of them can use.
        self.call_waiting()
        placement = self._place(lane, wish)
        if placement is not None:
            return placement
        model, queue = wish.query.model, self._config.queue
        is_there = bool(self._able(wish))
        if not is_there:
            self._check_may_come(wish)
        seconds = queue.max_wait_seconds if is_there else queue.patience_seconds
        latest = wish.urgency.latest
        if latest is not None:
            seconds = min(seconds, latest - self._pool.clock())
        # As it is now: should the versions' shares change meanwhile, some may wait a moment longer than they need.
        want = Want(self._split.versions_for(wish.query), wish.must_frame, wish.counted_here)
        before = lane.room.wants_before(wish.query.tenant, wish.urgency.priority, latest) if is_there else {}
        # Only behind others, who keep the estimate fresh.
        if before.get(want) and self._observed_wait(lane, wish, before) > seconds:
            raise self._overloaded(lane, wish, f"a place is expected only after more than {max(0.0, seconds):.3g} s")
        self._lanes.setdefault(model, lane)  # or nobody would call those who wait for a model that is not known yet
        try:
            return await lane.room.enter(
                wish.query.tenant,
                wish.urgency.priority,
                seconds,
                lambda: self._place(lane, wish),
                Placement.release,
                latest=latest,
                want=want,
            )
        except RoomFull:
            message = f"{queue.max_waiting_per_tenant} of your requests wait for a replica, which is the limit"
            raise self._overloaded(lane, wish, message) from None
        except TimeoutError:
            if self._able(wish):
                message = f"every replica of the model stayed full for {max(0.0, seconds):.3g} s"
                raise self._overloaded(lane, wish, message) from None
            self._check_may_come(wish)  # by now it may be known that there is no such model
            raise EngineUnavailable(self._lack(wish.query)) from None
        finally:
            if not (len(lane.room) or lane.forecast.has_held or self._is_known(model)):
                self._lanes.pop(model, None)

    def call_waiting(self) -> None:
        """Something about the replicas changed: look whether anybody who waits can be served."""
        for model, lane in list(self._lanes.items()):
            if lane.room.call_next():
                self._lanes[model] = self._lanes.pop(model)  # others that share its replicas come first next time

    def note_trouble(self, model: str, summary: str | None) -> None:
        """Take why replicas of a model that were asked for do not come, for those who wait for one; None: they do."""
        if summary is None:
            self._troubles.pop(model, None)
        else:
            self._troubles[model] = summary

    def note_full(self, replica: Replica, seconds: float | None) -> None:
        """A replica refused a request for being full: look again when it said to, else when probes come round again."""
        if seconds is None:
            seconds = self._config.health.probe_seconds
        seconds = min(max(seconds, _LEAST_FULL_SECONDS), _MOST_FULL_SECONDS)
        replica.note_full(seconds)
        asyncio.get_running_loop().call_later(seconds + 0.001, self.call_waiting)

    def _lane(self, model: str) -> _Lane:
        lane = self._lanes.get(model)
        if lane is None:
            lane = _Lane(self._config.policy_of(model), self._config.queue.max_waiting_per_tenant)
            if self._is_known(model):
                self._lanes[model] = lane
        return lane

    def _is_known(self, model: str) -> bool:
        """Whether a model's lane may stay: callers could make up any number of names."""
        return bool(self._pool.serving(model)) or model in self._config.models

    def _place(self, lane: _Lane, wish: Wish) -> Placement | None:
        able = [
            replica
            for replica in self._eligible(wish.query)
            if replica.is_usable and not replica.is_full and (not wish.must_frame or _can_go_on(replica, wish))
        ]
        if wish.avoid:
            able = [replica for replica in able if replica.url not in wish.avoid] or able
        if not able:
            return None
        # Of the version that was wanted; of another only where that one has no place.
        candidates = [replica for replica in able if replica.version == able[0].version]
        choice = lane.policy.choose(wish.query, candidates)
        return Placement(self, choice, lane, wish.query.most_output_tokens)

    def _eligible(self, query: RouteQuery) -> list[Replica]:
        """Return the replicas of the versions that may answer a request, those of the wanted one first."""
        serving, versions = self._pool.serving(query.model), self._split.versions_for(query)
        return [replica for version in versions for replica in serving if replica.version == version]

    def _lack(self, query: RouteQuery) -> str:
        versions = sorted({replica.version for replica in self._pool.serving(query.model) if replica.is_up})
        if versions:
            wanted = self._split.versions_for(query)[-1]
            return f"no replica of version {wanted!r} of this model is ready, only of: {', '.join(versions)}"
        if query.model in self._troubles:
            return f"no replica of this model is ready: {self._troubles[query.model]}; the gateway's log says why"
        return "no replica of this model is ready; try again in a few seconds"

    def _check_may_come(self, wish: Wish) -> None:
        """Raise where it makes no sense to wait for a replica, of which none is up."""
        model = wish.query.model
        if not self._may_come(model):
            raise UnknownModel(model, sorted({*self._pool.models(), *self._config.declared_models}))
        if not wish.must_frame or model in self._config.autoscaler:
            return
        # Whoever failed a stream may be back in a moment; but no server becomes one of another kind.
        known = self._eligible(wish.query)
        if known and not any(_can_go_on(replica, wish) for replica in known):
            raise EngineUnavailable("no replica that could go on with this stream is ready")

    def _may_come(self, model: str) -> bool:
        """Whether a model that no replica serves now is expected: declared, known before, or nobody told of any yet."""
        config = self._config
        if model in config.declared_models or model in config.aliases.values():
            return True
        gone, replicas = self._pool.gone_models, list(self._pool)
        if model in gone or self._pool.serving(model):
            return True
        if config.names_all_models or any(replica.is_up for replica in replicas):
            return False
        # What they served is what there is, whether all have gone or are away. One that never said may have it.
        return any(not replica.models for replica in replicas) if replicas else not gone

    def _overloaded(self, lane: _Lane, wish: Wish, message: str) -> Overloaded:
        """Return a refusal that says when to come again: when a replica said, or when those who wait will be served."""
        waits = [replica.seconds_until_free for replica in self._able(wish)]
        told = min((seconds for seconds in waits if seconds > 0), default=0.0)
        # Whoever comes again has a new deadline, behind those that its tenant has waiting.
        before = lane.room.wants_before(wish.query.tenant, wish.urgency.priority)
        forecast = lane.forecast.expected_wait(self._kinds(wish), before, self._pool.clock()) or 0.0
        return Overloaded(message, retry_after_seconds=max(told, forecast))

    def _observed_wait(self, lane: _Lane, wish: Wish, before: Mapping[Want, float]) -> float:
        """Return how long a request must wait if places go on to come free as they did; 0: nobody knows.

        `before`: what those want who are served before it.
        """
        return lane.forecast.observed_wait(self._kinds(wish), before, self._pool.clock()) or 0.0

    def _able(self, wish: Wish) -> list[Replica]:
        """Return the replicas that are up and could take a request if they had a place."""
        return [item for item in self._eligible(wish.query) if item.is_up and _can_go_on(item, wish)]

    def _kinds(self, wish: Wish) -> set[PlaceKind]:
        return {_kind_of(replica) for replica in self._able(wish)}


def _kind_of(replica: Replica) -> PlaceKind:
    return PlaceKind(replica.version, replica.adapter.can_frame, replica.is_counted_here)


def _can_go_on(replica: Replica, wish: Wish) -> bool:
    return not wish.must_frame or _kind_of(replica).can_go_on(counted_here=wish.counted_here)
