"""Who waits, and who is next."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.fleet.router.waiting_room import RoomFull, WaitingRoom


class Places:
    """So many places; what is given back can be had again."""

    def __init__(self, free: int = 0) -> None:
        self.free = free

    def take(self) -> str | None:
        if not self.free:
            return None
        self.free -= 1
        return "place"

    def give_back(self, place: str) -> None:
        self.free += 1


async def queue_up(room, places, *callers):
    """Let (name, tenant, priority, latest) enter one after the other; return the names as they are served."""
    served: list[str] = []

    async def enter(name, tenant, priority, latest=None):
        await room.enter(tenant, priority, 5.0, places.take, places.give_back, latest=latest, want=None)
        served.append(name)

    tasks = [asyncio.create_task(enter(*caller)) for caller in callers]
    await asyncio.sleep(0)
    return served, tasks


async def serve(room, places, tasks):
    for _ in tasks:
        places.free += 1
        room.call_next()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)


async def test_tenants_take_turns_whoever_came_first():
    room, places = WaitingRoom(10), Places()
    served, tasks = await queue_up(room, places, *[(f"a{i}", "a", 0) for i in range(3)], ("b0", "b", 0), ("c0", "c", 0))
    await serve(room, places, tasks)
    assert served == ["a0", "b0", "c0", "a1", "a2"]


async def test_priority_comes_before_turns():
    room, places = WaitingRoom(10), Places()
    served, tasks = await queue_up(room, places, ("low", "a", -1), ("plain", "b", 0), ("high", "a", 5))
    await serve(room, places, tasks)
    assert served == ["high", "plain", "low"]


async def test_of_one_tenants_requests_the_nearest_deadline_comes_first():
    room, places = WaitingRoom(10), Places()
    callers = [("never", "a", 0), ("late", "a", 0, 9.0), ("soon", "a", 0, 3.0), ("soon too", "a", 0, 3.0)]
    served, tasks = await queue_up(room, places, *callers, ("other", "b", 0, 1.0), ("high", "a", 1))
    await serve(room, places, tasks)
    # Tenants take turns all the same: nobody gets ahead of others by being in a hurry.
    assert served == ["high", "soon", "other", "soon too", "late", "never"]


async def test_a_tenant_may_have_so_many_waiting_and_no_more():
    room, places = WaitingRoom(2), Places()
    _, tasks = await queue_up(room, places, ("a0", "a", 0), ("a1", "a", 3), ("b0", "b", 0))
    with pytest.raises(RoomFull):
        await room.enter("a", 0, 5.0, places.take, places.give_back, want=None)
    await serve(room, places, tasks)
    assert len(room) == 0


async def test_who_waited_too_long_leaves_and_takes_nothing():
    room, places = WaitingRoom(2), Places()
    with pytest.raises(TimeoutError):
        await room.enter("a", 0, 0.01, places.take, places.give_back, want=None)
    assert len(room) == 0
    places.free += 1
    room.call_next()
    assert places.free == 1


async def test_a_place_given_to_who_is_leaving_is_given_back():
    room, places = WaitingRoom(2), Places()
    _, (task,) = await queue_up(room, places, ("a", "a", 0))
    places.free = 1
    room.call_next()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert places.free == 1


MOMENTS = st.sampled_from([None, 1.0, 2.0])
CALLERS = st.tuples(st.sampled_from("abcd"), st.integers(0, 2), MOMENTS, st.sampled_from("xy"))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(CALLERS, st.none()), max_size=30), CALLERS)
def test_what_is_said_to_be_before_a_newcomer_is_what_is_served_before_it(steps, newcomer):
    """Steps: somebody comes, or a place does."""
    asyncio.run(compare_with_serving(steps, newcomer))


async def compare_with_serving(steps, newcomer):
    room, places = WaitingRoom(100), Places()
    served, tasks = [], []

    async def enter(number, tenant, priority, latest, want):
        await room.enter(tenant, priority, 5.0, places.take, places.give_back, latest=latest, want=want)
        served.append((number, want))

    async def come(caller):
        tasks.append(asyncio.create_task(enter(len(tasks), *caller)))
        await asyncio.sleep(0)

    for step in steps:
        if step is not None:
            await come(step)
        elif len(room):
            await serve_one(room, places)
    tenant, priority, latest, _ = newcomer
    told = room.wants_before(tenant, priority, latest)
    num_served, own = len(served), len(tasks)
    await come(newcomer)
    while own not in [number for number, _ in served]:
        await serve_one(room, places)
    before = Counter(want for number, want in served[num_served:] if number != own)
    assert {want: number for want, number in told.items() if number} == pytest.approx(before)
    while len(room):
        await serve_one(room, places)
    await asyncio.gather(*tasks)


async def serve_one(room, places):
    places.free += 1
    room.call_next()
    await asyncio.sleep(0)
    await asyncio.sleep(0)


class CountedWant:
    """Tells how often anybody looked at one."""

    num_looks = 0

    def __init__(self, number):
        self.number = number

    def __hash__(self):
        CountedWant.num_looks += 1
        return self.number


@pytest.mark.parametrize("num_wants", [1, 2])
async def test_to_say_who_is_before_a_newcomer_nobody_looks_at_all_who_wait(num_wants):
    room, wants = WaitingRoom(100), [CountedWant(number) for number in range(num_wants)]
    tasks = []
    for number in range(200 * 40):
        want = wants[number // 200 % num_wants]
        enter = room.enter(f"t{number % 200}", number % 2, 5.0, lambda: None, print, want=want)
        tasks.append(asyncio.create_task(enter))
    await asyncio.sleep(0)
    CountedWant.num_looks = 0
    # Half of the tenants are of the higher priority, with 40 each; t0 is the first of the others, who have as many.
    assert sum(room.wants_before("t0", 0).values()) == pytest.approx(100 * 40 + 100 * 40)
    assert sum(room.wants_before("new", 0).values()) == pytest.approx(100 * 40 + 100)
    assert CountedWant.num_looks < 300
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
