"""The queue's books stay small and true however requests come and go."""

import random

import pytest

from penstock.engine.cache.kv_cache import RequestCache
from penstock.engine.scheduler.prompt_work import PromptWork
from penstock.engine.scheduler.request_state import RequestState
from penstock.engine.scheduler.waiting_queue import AGEING_SECONDS, RISE_INTERVAL_SECONDS, WaitingQueue
from penstock.request import SamplingParams

QUANTUM = 100.0


def make_request(queue, number, tenant, *, due=0.0, level=(0, 0), weight=1.0, num_tokens=4):
    return RequestState(
        number=number, client=b"", request_id=str(number), tokens=[1] * num_tokens,
        num_prompt_tokens=num_tokens, max_total_tokens=num_tokens + 4,
        params=SamplingParams(), stop_ids=frozenset(), seed=0, arrival=0.0, cache=RequestCache(b""), tenant=tenant,
        account=queue.open_account(level, tenant, weight, num_tokens), level=level, due=due,
        work=PromptWork.of_one(num_tokens),
    )  # fmt: skip


@pytest.mark.parametrize("more", [(4, 4), (2000,)])
def test_the_tenant_that_asks_for_least_goes_first_until_it_leads_by_the_quantum(more):
    queue = WaitingQueue(QUANTUM)
    first, *_ = asked = [make_request(queue, number, "a", num_tokens=tokens) for number, tokens in enumerate(more)]
    second = make_request(queue, 9, "b")
    for item in (*asked, second):
        queue.push(item, 0.0)
    assert queue.best() is second
    second.account.counter += QUANTUM / 2
    assert queue.best() is second
    second.account.counter += QUANTUM
    assert queue.best() is first


def test_who_has_ended_asks_for_nothing_any_more():
    queue = WaitingQueue(QUANTUM)
    ended, first, second = make_request(queue, 0, "a"), make_request(queue, 1, "a"), make_request(queue, 2, "b")
    for item in (first, second):
        queue.push(item, 0.0)
    second.account.counter += 1.0
    assert queue.best() is second
    queue.dismiss(ended)
    assert queue.best() is first


def test_the_most_urgent_request_of_a_tenant_goes_first():
    queue = WaitingQueue(QUANTUM)
    late, soon = make_request(queue, 0, "a", due=5.0), make_request(queue, 1, "a", due=1.0)
    for item in (late, soon):
        queue.push(item, 0.0)
    assert queue.best() is soon
    queue.remove(soon)
    assert queue.best() is late


def test_who_comes_back_starts_level_with_those_who_wait():
    queue = WaitingQueue(QUANTUM)
    waiting = make_request(queue, 0, "a")
    queue.push(waiting, 0.0)
    waiting.account.counter = 5000.0
    newcomer = make_request(queue, 1, "b")
    queue.push(newcomer, 0.0)
    assert newcomer.account.counter == 5000.0


def test_the_books_do_not_grow_with_what_has_passed():
    queue, rng = WaitingQueue(QUANTUM), random.Random(1)
    kept = make_request(queue, 0, "a")
    queue.push(kept, 0.0)
    for number in range(1, 3000):
        item = make_request(queue, number, rng.choice("abc"), due=rng.random())
        queue.push(item, 0.0)
        chosen = queue.best()
        assert chosen is not None
        queue.change_rows(item, 1)
        item.account.counter += rng.random()
        queue.remove(item)
        queue.change_rows(item, -1)
        queue.dismiss(item)
    (level,) = queue.levels
    assert len(level._by_demand) < 100
    assert len(level._by_counter) <= 3
    assert len(queue._risers) < 100
    assert set(level.accounts) <= set("abc")


def test_of_one_tenants_old_requests_one_at_a_time_rises_above_anothers_new_one():
    queue = WaitingQueue(QUANTUM)
    old = [make_request(queue, number, "a", due=number) for number in range(20)]
    for item in old:
        queue.push(item, 0.0)
    now = 2 * AGEING_SECONDS
    queue.age(now)
    assert [item.level for item in old].count((0, 0)) == 19
    newcomer = make_request(queue, 20, "b", due=now)
    queue.push(newcomer, now)
    queue.change_rows(old[1], 1)
    assert queue.best() is old[0]
    queue.remove(old[0])
    queue.age(now + RISE_INTERVAL_SECONDS / 2)
    assert queue.best() is newcomer


def test_none_rises_while_others_of_its_tenant_start_where_it_waits():
    queue = WaitingQueue(QUANTUM)
    old, other = make_request(queue, 0, "a"), make_request(queue, 1, "b")
    queue.push(old, 0.0)
    queue.push(other, AGEING_SECONDS)
    old.account.last_start = AGEING_SECONDS - 1.0
    queue.age(1.9 * AGEING_SECONDS - 1.0)
    assert old.level == (0, 0)
    queue.age(2.0 * AGEING_SECONDS)
    assert old.level == (0, -1)


def test_one_rises_above_those_of_its_own_tenant_where_there_is_no_other():
    queue = WaitingQueue(QUANTUM)
    gone, old = make_request(queue, 0, "b"), make_request(queue, 1, "a")
    queue.push(old, 0.0)
    queue.levels[0].accounts["b"].counter = 9 * QUANTUM  # so that it is remembered
    queue.dismiss(gone)
    assert "b" in queue.levels[0].accounts
    old.account.last_start = AGEING_SECONDS
    queue.age(AGEING_SECONDS)
    assert old.level == (0, -1)


def test_all_old_requests_of_a_tenant_rise_in_the_end():
    queue = WaitingQueue(QUANTUM)
    old = [make_request(queue, number, "a") for number in range(5)]
    for item in old:
        queue.push(item, 0.0)
    now = AGEING_SECONDS
    while any(item.level == (0, 0) for item in old):
        assert now <= AGEING_SECONDS + 5 * RISE_INTERVAL_SECONDS
        queue.age(now)
        now += 0.1
