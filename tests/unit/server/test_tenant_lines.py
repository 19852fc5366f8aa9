"""TenantLines: fair between tenants by what they take, bounded, and left at once by whoever cannot wait any longer."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import DeadlineExceeded, Overloaded
from penstock.request import Tier
from penstock.server import tenant_lines
from penstock.server.claim import Claim
from penstock.server.tenant_lines import TenantLines


class Served:
    """Notes whose turn it was, and holds the first one until all others wait."""

    def __init__(self):
        self.lines = TenantLines()
        self.order = []
        self.gate = asyncio.Event()
        self.tasks = []

    def ask(self, name, size=1, claim=None):
        async def work():
            self.order.append(name)
            await self.gate.wait()

        tenant = name.rstrip("0123456789")
        self.tasks.append(asyncio.create_task(self.lines.run(claim or Claim(tenant), size, work)))
        return self.tasks[-1]

    async def finish(self):
        await asyncio.sleep(0.001)
        self.gate.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        return self.order


async def test_a_flood_costs_another_tenant_the_turn_under_way():
    served = Served()
    for number in range(20):
        served.ask(f"flood{number}", 1000)
    await asyncio.sleep(0)
    served.ask("other", 900)
    assert (await served.finish()).index("other") == 1


async def test_a_small_request_goes_before_another_tenants_large_one():
    served = Served()
    for name, size in (("first", 10), ("large", 100_000), ("small", 10)):
        served.ask(name, size)
    assert await served.finish() == ["first", "small", "large"]


async def test_a_large_request_is_not_passed_for_ever():
    served = Served()
    served.ask("first", 10)
    served.ask("large", 100_000)
    for number in range(300):
        served.ask(f"small{number}", 1000)
    assert 60 < (await served.finish()).index("large") < 75


async def test_a_tenants_own_requests_keep_their_order():
    served = Served()
    for number, size in enumerate((1, 5000, 1, 300, 1)):
        served.ask(f"own{number}", size)
    assert await served.finish() == [f"own{number}" for number in range(5)]


async def test_batch_work_goes_when_nobody_else_waits():
    served = Served()
    served.ask("first", 10)
    served.ask("batch", 1, Claim("batch", Tier.BATCH))
    for number in range(3):
        served.ask(f"online{number}", 100_000)
    assert (await served.finish())[-1] == "batch"


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5000)), min_size=2, max_size=60))
def test_while_two_tenants_wait_what_they_took_stays_together(asked):
    async def serve():
        served = Served()
        served.ask("opening")
        for number, (tenant, size) in enumerate(asked):
            served.ask(f"{tenant}{number}", size)
        return (await served.finish())[1:]

    order = asyncio.run(serve())
    left = {tenant: sum(1 for name, _ in asked if name == tenant) for tenant in "ab"}
    took = dict.fromkeys("ab", 0)
    for name in order:
        if not all(left.values()):
            break
        took[name[0]] += asked[int(name[1:])][1] + tenant_lines._TURN_SIZE
        left[name[0]] -= 1
        assert abs(took["a"] - took["b"]) <= 5000 + tenant_lines._TURN_SIZE


async def test_whoever_cannot_wait_any_longer_leaves_at_once_and_takes_no_turn():
    served = Served()
    served.ask("first")
    soon = time.monotonic() + 0.02
    late = served.ask("late", claim=Claim("late", deadline=soon))
    slow = served.ask("slow", claim=Claim("slow", first_token_due=soon))
    await asyncio.wait((late, slow))
    assert isinstance(late.exception(), DeadlineExceeded)
    assert isinstance(slow.exception(), Overloaded)
    served.ask("next")
    assert await served.finish() == ["first", "next"]


async def test_work_that_has_begun_keeps_its_turn_though_nobody_waits_for_it():
    served = Served()
    late = served.ask("late", claim=Claim("late", deadline=time.monotonic() + 0.5))
    served.ask("next")
    await asyncio.wait((late,))
    assert isinstance(late.exception(), DeadlineExceeded)
    assert served.order == ["late"], "the next one must not begin beside it"
    assert await served.finish() == ["late", "next"]


async def test_a_caller_who_is_cancelled_leaves_the_line():
    served = Served()
    served.ask("first")
    gone = served.ask("gone")
    served.ask("next")
    await asyncio.sleep(0.001)
    gone.cancel()
    assert await served.finish() == ["first", "next"]


async def test_what_fails_ends_its_turn_and_says_why():
    lines = TenantLines()

    async def fail():
        raise ValueError("why")

    async def succeed():
        return "done"

    with pytest.raises(ValueError, match="why"):
        await lines.run(Claim("a"), 1, fail)
    assert await lines.run(Claim("a"), 1, succeed) == "done"


@pytest.mark.parametrize(("limit", "most"), [("MAX_WAITING", 3), ("MAX_WAITING_SIZE", 3000)])
async def test_a_tenants_line_is_bounded_and_leaves_others_theirs(monkeypatch, limit, most):
    monkeypatch.setattr(tenant_lines, limit, most)
    served = Served()
    for number in range(5):
        served.ask(f"flood{number}", 400)
    await asyncio.sleep(0.001)
    refused = [task.exception() for task in served.tasks if task.done()]
    assert [type(error) for error in refused] == [Overloaded]
    served.ask("other", 400)
    assert "other" in await served.finish()
