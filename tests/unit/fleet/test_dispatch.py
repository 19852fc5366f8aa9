"""Who gets which replica, and who waits, where requests want different ones."""

import asyncio
import dataclasses

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import EngineUnavailable, Overloaded, UnknownModel
from penstock.fleet.adapters.interface import ServedModel
from penstock.fleet.config import (
    AutoscalerSection,
    DiscoverySection,
    DnsSection,
    FleetConfig,
    ModelSection,
    ReplicaEntry,
)
from penstock.fleet.replica import ReplicaPool
from penstock.fleet.router.dispatch import Dispatcher, Wish
from penstock.fleet.router.query import RouteQuery, read_head
from penstock.fleet.router.urgency import Urgency
from tests.unit.fleet.conftest import QUICK, FakeClock

QUEUE = msgspec.structs.replace(QUICK.queue, max_waiting_per_tenant=100, max_wait_seconds=60.0, hold_seconds=60.0)


class Fleet:
    """Replicas without servers, by name, each with one place unless it is said otherwise."""

    def __init__(self, **config):
        self.clock = FakeClock()
        self.pool = ReplicaPool(QUICK.health, self.clock)
        self.dispatcher = Dispatcher(FleetConfig(**{"queue": QUEUE, **config}), self.pool)
        self.waiters = []

    def add(self, name, *, version="stable", kind="penstock", models=("tiny",), max_in_flight=1):
        entry = ReplicaEntry(url=f"http://{name}:80", version=version, kind=kind, max_in_flight=max_in_flight)
        replica = self.pool.add("test", entry)
        replica.models = tuple(map(ServedModel, models))
        replica.breaker.on_probe(True)
        return replica

    async def ask(self, **wish):
        """Let a request come; return its task, which is done where it need not wait."""
        task = asyncio.create_task(self.dispatcher.acquire(a_wish(**wish)))
        self.waiters.append(task)
        await turn()
        return task

    async def end(self):
        for task in self.waiters:
            task.cancel()
        await asyncio.gather(*self.waiters, return_exceptions=True)


def a_wish(*, tenant="a", version=None, model="tiny", priority=0, **fields):
    head = read_head(msgspec.json.encode({"model": model}))
    query = RouteQuery(head, model=model, tenant=tenant, session=None, version=version)
    return Wish(query, Urgency(priority=priority), **fields)


async def turn():
    for _ in range(4):
        await asyncio.sleep(0)


@pytest.fixture
async def fleet():
    fleet = Fleet()
    yield fleet
    await fleet.end()


async def test_who_waits_for_one_version_keeps_nobody_from_another(fleet):
    fleet.add("stable")
    other = fleet.add("other", version="b")
    await fleet.ask()
    waiting = await fleet.ask()
    named = await fleet.ask(version="b")
    assert not waiting.done()
    assert named.result().replica is other


async def test_a_place_goes_to_the_first_of_those_who_can_use_it(fleet):
    fleet.add("stable")
    other = fleet.add("other", version="b")
    await fleet.ask()
    held = (await fleet.ask(version="b")).result()
    stable, first, second = await fleet.ask(), await fleet.ask(version="b"), await fleet.ask(version="b")
    held.release()
    await turn()
    assert first.result().replica is other
    assert not stable.done() and not second.done()


async def test_who_comes_does_not_pass_those_who_wait_for_the_same_replica(fleet):
    one = fleet.add("one")
    await fleet.ask()
    one.note_full(5.0)
    waiting = await fleet.ask()
    one.entry = msgspec.structs.replace(one.entry, max_in_flight=2)
    fleet.clock.now += 6.0  # it has room again, and nobody has noticed
    late = await fleet.ask(tenant="b")
    assert waiting.done() and not late.done()


async def test_a_replica_that_says_it_is_full_for_an_hour_is_asked_again_after_half_a_minute(fleet):
    one = fleet.add("one", max_in_flight=8)
    fleet.dispatcher.note_full(one, 3600.0)
    waiting = await fleet.ask()
    assert not waiting.done()
    fleet.clock.now += 31.0
    await fleet.ask()
    assert waiting.done()


async def test_models_that_share_a_replica_take_turns_on_it(fleet):
    fleet.add("both", models=("tiny", "big"))
    held = (await fleet.ask()).result()
    tiny, big = await fleet.ask(), await fleet.ask(model="big")
    other_tiny = await fleet.ask()
    held.release()
    await turn()
    first, second = (tiny, big) if tiny.done() else (big, tiny)
    first.result().release()
    await turn()
    assert second.done() and not other_tiny.done()


@pytest.mark.parametrize("kind", ["vllm", "penstock"])
async def test_a_stream_that_no_replica_could_go_on_with_is_given_up_at_once_and_others_are_served(fleet, kind):
    other = fleet.add("other", kind=kind, max_in_flight=None)
    other.is_counted_here = True  # as a server of ours that does not share the gateway's store
    stream = await fleet.ask(must_frame=True)
    assert isinstance(stream.exception(), EngineUnavailable)
    assert (await fleet.ask()).result().replica is other


async def test_a_stream_is_held_for_its_only_replica_that_failed_it_and_is_back_soon(fleet):
    lone = fleet.add("lone")
    lone.breaker.on_failure("it refuses connections", is_fatal=True)
    stream = await fleet.ask(must_frame=True, avoid={lone.url})
    fleet.clock.now += 5.0
    fleet.dispatcher.call_waiting()
    await turn()
    assert not stream.done()
    lone.breaker.on_probe(True)
    fleet.dispatcher.call_waiting()
    await turn()
    assert stream.result().replica is lone


async def test_a_stream_whose_only_replica_stays_away_is_held_no_longer_than_any_request():
    queue = msgspec.structs.replace(QUEUE, hold_seconds=0.01)
    fleet = Fleet(queue=queue)
    lone = fleet.add("lone")
    lone.breaker.on_failure("it refuses connections", is_fatal=True)
    with pytest.raises(EngineUnavailable):
        await fleet.dispatcher.acquire(a_wish(must_frame=True, avoid={lone.url}))


async def test_a_stream_waits_for_a_full_replica_that_can_go_on_with_it_and_holds_up_nobody(fleet):
    able, foreign = fleet.add("able"), fleet.add("foreign", kind="vllm")
    held = (await fleet.ask(must_frame=True)).result()
    stream = await fleet.ask(must_frame=True)
    assert (await fleet.ask()).result().replica is foreign
    held.release()
    await turn()
    assert stream.result().replica is able


@pytest.mark.parametrize("trouble", ["not_ready", "ejected"])
async def test_a_stream_is_held_for_a_replica_that_has_not_failed_it(fleet, trouble):
    dead, away = fleet.add("dead"), fleet.add("away")
    dead.breaker.on_failure("it refuses connections", is_fatal=True)
    if trouble == "not_ready":
        away.breaker.on_probe(False, "it starts")
    else:
        away.breaker.on_failure("it refuses connections", is_fatal=True)
    stream = await fleet.ask(must_frame=True, avoid={dead.url})
    assert not stream.done()
    fleet.clock.now += 10.0
    away.breaker.on_probe(True)
    fleet.dispatcher.call_waiting()
    await turn()
    assert stream.result().replica is away


async def test_a_stream_is_held_where_the_autoscaler_will_replace_its_replica():
    fleet = Fleet(autoscaler={"tiny": AutoscalerSection(backend={"kind": "local"})})
    dead = fleet.add("dead")
    dead.breaker.on_failure("it refuses connections", is_fatal=True)
    stream = await fleet.ask(must_frame=True, avoid={dead.url})
    assert not stream.done()
    fresh = fleet.add("fresh")
    fleet.dispatcher.call_waiting()
    await turn()
    assert stream.result().replica is fresh
    await fleet.end()


async def test_a_request_is_held_for_a_model_of_which_nobody_has_heard_yet(fleet):
    held = await fleet.ask()
    other = await fleet.ask(model="other")
    replica = fleet.add("first")
    fleet.dispatcher.call_waiting()
    await turn()
    assert held.result().replica is replica
    assert fleet.dispatcher.num_waiting_for("other") == 1
    other.cancel()
    await turn()
    assert fleet.dispatcher.num_waiting == 0


async def test_once_all_have_gone_only_what_they_served_or_is_declared_is_waited_for():
    declared = AutoscalerSection(backend={"kind": "local"})
    fleet = Fleet(autoscaler={"scaled": declared}, aliases={"nick": "named"})
    fleet.add("first", models=("tiny", "adapter"))
    assert fleet.pool.remove("test", "http://first:80", "it went")
    held = [await fleet.ask(model=model) for model in ("tiny", "adapter", "scaled", "named")]
    assert not any(task.done() for task in held)
    unknown = await fleet.ask(model="other")
    assert isinstance(unknown.exception(), UnknownModel)
    await fleet.end()


async def test_where_a_local_autoscaler_starts_all_replicas_only_its_models_are_waited_for():
    local = AutoscalerSection(backend={"kind": "local"})
    fleet = Fleet(autoscaler={"scaled": local})
    assert isinstance((await fleet.ask(model="nope")).exception(), UnknownModel)
    assert not (await fleet.ask(model="scaled")).done()
    await fleet.end()
    others = [
        {"discovery": DiscoverySection(dns=(DnsSection(name="replicas", port=80),))},
        {"autoscaler": {"scaled": AutoscalerSection(backend={"kind": "external"})}},
        {"queue": msgspec.structs.replace(QUEUE, hold_unknown=True)},
    ]
    for other in others:  # from where replicas may come that serve something else
        fleet = Fleet(**{"autoscaler": {"scaled": local}, **other})
        assert not (await fleet.ask(model="nope")).done()
        await fleet.end()


async def test_a_fleet_that_holds_nothing_unknown_waits_for_what_it_declares():
    queue = msgspec.structs.replace(QUEUE, hold_unknown=False)
    fleet = Fleet(queue=queue, models={"named": ModelSection(policy="round-robin")})
    assert isinstance((await fleet.ask(model="nope")).exception(), UnknownModel)
    assert not (await fleet.ask(model="named")).done()
    await fleet.end()


async def test_while_all_are_away_that_told_their_models_no_other_is_waited_for(fleet):
    fleet.add("away").breaker.on_failure("it refuses connections", is_fatal=True)
    assert isinstance((await fleet.ask(model="nope")).exception(), UnknownModel)
    assert not (await fleet.ask()).done()
    fleet.add("silent", models=()).breaker.on_failure("it refuses connections", is_fatal=True)
    assert not (await fleet.ask(model="nope")).done()


async def test_who_was_held_for_a_model_that_does_not_exist_is_told_so():
    fleet = Fleet(queue=msgspec.structs.replace(QUEUE, hold_seconds=0.05))
    held = await fleet.ask(model="other")
    assert not held.done()
    fleet.add("first")
    with pytest.raises(UnknownModel):
        await held


async def test_those_who_want_another_replica_do_not_make_a_wait_look_too_long(fleet):
    fleet.add("stable")
    fleet.add("other", version="b")
    held = (await fleet.ask()).result()
    (await fleet.ask(version="b")).result()
    waiting = [await fleet.ask() for _ in range(20)]
    for number in range(2):  # a place every five seconds: twenty would take longer than anybody may wait
        fleet.clock.now += 5.0
        held.release()
        await turn()
        held = waiting[number].result()
    assert isinstance((await fleet.ask()).exception(), Overloaded)
    assert not (await fleet.ask(version="b")).done()


async def pace(fleet, held, waiting, seconds, times=3):
    """Have a place come free every so many seconds while others wait for it; return the place of the last."""
    for task in waiting[:times]:
        fleet.clock.now += seconds
        held.release()
        await turn()
        held = task.result()
    return held


async def busy_place(fleet, **wish):
    """Have four requests wait for one place, which has come free every 2.5 s."""
    fleet.add("one")
    held = (await fleet.ask(**wish)).result()
    await pace(fleet, held, [await fleet.ask(**wish) for _ in range(7)], 2.5)


async def test_a_request_of_a_higher_priority_is_not_refused_for_those_that_it_passes():
    fleet = Fleet(queue=msgspec.structs.replace(QUEUE, max_wait_seconds=9.0))
    await busy_place(fleet)
    assert isinstance((await fleet.ask()).exception(), Overloaded)
    first = await fleet.ask(priority=5)
    assert not first.done()
    # Behind one only, also for who cannot wait.
    assert await retry_after(fleet, priority=5) == pytest.approx(5.0)
    await fleet.end()


async def test_a_tenant_is_not_refused_for_the_queue_of_another():
    fleet = Fleet(queue=msgspec.structs.replace(QUEUE, max_wait_seconds=9.0))
    await busy_place(fleet, tenant="flood")
    assert isinstance((await fleet.ask(tenant="flood")).exception(), Overloaded)
    assert await retry_after(fleet, tenant="b") == pytest.approx(5.0)
    assert not (await fleet.ask(tenant="b")).done()
    # Its second is behind its first and two of the other's, whose turn comes before.
    assert await retry_after(fleet, tenant="b") == pytest.approx(10.0)
    await fleet.end()


async def retry_after(fleet, **wish):
    """Return what a request that cannot wait is told."""
    now = Urgency(deadline=fleet.clock.now, priority=wish.get("priority", 0))
    with pytest.raises(Overloaded) as caught:
        await fleet.dispatcher.acquire(dataclasses.replace(a_wish(**wish), urgency=now))
    return caught.value.retry_after_seconds


async def test_a_refusal_says_when_a_place_of_the_version_that_was_waited_for_comes_free(fleet):
    fleet.add("stable")
    fleet.add("other", version="b")
    stable, other = (await fleet.ask()).result(), (await fleet.ask(version="b")).result()
    for_stable = [await fleet.ask() for _ in range(10)]
    for_other = [await fleet.ask(version="b") for _ in range(5)]
    await pace(fleet, stable, for_stable, 8.0)
    await pace(fleet, other, for_other, 0.5)
    # Two wait for the other version, of which a place comes every half second. Where it is full, stable is as good.
    assert await retry_after(fleet, version="b") == pytest.approx(1.5)
    # Seven wait for the stable one, and the two may take its places too; who has it, has had it for 1.5 s.
    assert await retry_after(fleet) == pytest.approx(78.5)


async def test_a_refused_stream_is_told_of_places_on_which_it_could_go_on(fleet):
    fleet.add("able")
    fleet.add("foreign", kind="vllm")
    able, foreign = (await fleet.ask(must_frame=True)).result(), (await fleet.ask()).result()
    streams = [await fleet.ask(must_frame=True) for _ in range(4)]
    others = [await fleet.ask() for _ in range(4)]
    assert foreign.replica.name == "foreign:80"
    await pace(fleet, able, streams, 6.0)
    await pace(fleet, foreign, others, 0.5)
    # One stream waits, and one request that may have this place too; who has it, has had it for 1.5 s.
    assert await retry_after(fleet, must_frame=True) == pytest.approx(16.5)
    # Who may have either has his turn behind two as well, but places come of both.
    assert await retry_after(fleet) < 3.0


async def test_a_full_replica_that_a_request_may_not_have_does_not_say_when_to_come_again(fleet):
    fleet.add("stable")
    other = fleet.add("other", version="b")
    await fleet.ask()
    fleet.clock.now += 2.0
    other.note_full(30.0)
    assert await retry_after(fleet) == pytest.approx(2.0)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("ask"),
            st.sampled_from("abc"),
            st.sampled_from([None, "b", "c", "nobody"]),
            st.integers(0, 1),
            st.booleans(),
        ),
        st.tuples(st.just("release"), st.integers(0, 9)),
        st.tuples(st.just("leave"), st.integers(0, 9)),
    ),
    max_size=40,
)


@settings(max_examples=40, deadline=None)
@given(ACTIONS, st.lists(st.integers(1, 2), min_size=4, max_size=4))
def test_nobody_waits_while_a_replica_that_he_may_have_has_room(actions, places):
    asyncio.run(play(actions, places))


async def play(actions, places):
    """After whatever happened, no waiting request could be placed, and equal wishes were served in order."""
    fleet = Fleet()
    fleet.add("one", max_in_flight=places[0])
    fleet.add("two", version="b", max_in_flight=places[1])
    fleet.add("three", version="c", max_in_flight=places[2])
    fleet.add("foreign", version="b", kind="vllm", max_in_flight=places[3])
    asked = []  # (wish, task), in the order in which they came
    left = set()
    for name, *values in actions:
        held = [task.result() for _, task in asked if task.done() and task not in left]
        waiting = [task for _, task in asked if not task.done()]
        if name == "ask":
            tenant, version, priority, must_frame = values
            wish = {"tenant": tenant, "version": version, "priority": priority, "must_frame": must_frame}
            asked.append((wish, await fleet.ask(**wish)))
        elif name == "release" and held:
            placement = held[values[0] % len(held)]
            placement.release()
            left |= {task for _, task in asked if task.done() and task not in left and task.result() is placement}
        elif name == "leave" and waiting:
            task = waiting[values[0] % len(waiting)]
            task.cancel()
            left.add(task)
        await turn()
        still = [(wish, task) for wish, task in asked if not task.done()]
        for wish, _ in still:
            assert not any(may_have(wish, replica) and not replica.is_full for replica in fleet.pool)
        for place, (wish, _) in enumerate(asked):
            same = [task for other, task in asked[place:] if other == wish and task not in left]
            assert [task.done() for task in same] == sorted((task.done() for task in same), reverse=True)
    await fleet.end()


def may_have(wish, replica):
    is_version = replica.version in ("stable", wish["version"])
    return is_version and (replica.adapter.can_frame or not wish["must_frame"])
