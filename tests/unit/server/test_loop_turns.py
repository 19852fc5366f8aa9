"""LoopTurns: how much long work one pass of the event loop holds."""

import asyncio

from penstock.server.loop_turns import ENTRIES_A_PASS, LoopTurns


async def work(turns, done, name, num_slices, num_entries=ENTRIES_A_PASS):
    for _ in range(num_slices):
        await turns.take(num_entries)
        done.append(name)


async def passes(done, tasks):
    """Let the loop run to the end of the tasks; return what was done in each of its passes."""
    seen = []
    while not all(task.done() for task in tasks):
        before = len(done)
        await asyncio.sleep(0)
        seen.append(done[before:])
    return [names for names in seen if names]


async def test_however_many_have_long_work_each_pass_holds_one_slice():
    turns, done = LoopTurns(), []
    tasks = [asyncio.create_task(work(turns, done, name, 3)) for name in "abc"]
    assert list(map(len, await passes(done, tasks))) == [1] * 9
    assert set(done[:4]) == {"a", "b", "c"}  # nobody waits for another's end


async def test_small_slices_share_a_pass():
    turns, done = LoopTurns(), []
    tasks = [asyncio.create_task(work(turns, done, name, 2, ENTRIES_A_PASS // 2)) for name in "ab"]
    assert sorted(map(len, await passes(done, tasks))) == [2, 2]
    assert sorted(done) == ["a", "a", "b", "b"]


async def test_who_is_cancelled_while_waiting_takes_no_turn():
    turns, done = LoopTurns(), []
    tasks = [asyncio.create_task(work(turns, done, name, 1)) for name in "abc"]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert done == ["a", "c"]
    await asyncio.wait_for(turns.take(ENTRIES_A_PASS), 1)


async def test_a_turn_is_free_again_when_nobody_wants_one():
    turns = LoopTurns()
    for _ in range(3):
        await turns.take(ENTRIES_A_PASS)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert turns._num_left == ENTRIES_A_PASS
