"""StoreThread: tenants take turns, a tenant's own questions keep their order, and what fails is told."""

import threading

import pytest

from penstock.metering.store_thread import StoreThread


@pytest.fixture
def thread():
    thread = StoreThread("store")
    yield thread
    thread.shutdown()


@pytest.fixture
def gate(thread):
    """What holds the thread up until it is set."""
    gate = threading.Event()
    thread.submit(gate.wait)
    yield gate
    gate.set()


def test_one_of_each_tenants_line_is_asked_in_turn(thread, gate):
    asked = []
    flood = [thread.submit_for("flood", lambda i=i: asked.append(f"flood {i}")) for i in range(100)]
    for name in ("alice", "bob"):
        for i in range(2):
            thread.submit_for(name, lambda name=name, i=i: asked.append(f"{name} {i}"))
    books = thread.submit(asked.append, "books")
    gate.set()
    books.result(10), flood[-1].result(10)
    assert asked[:7] == ["flood 0", "alice 0", "bob 0", "books", "flood 1", "alice 1", "bob 1"]
    assert asked[7:] == [f"flood {i}" for i in range(2, 100)]


def test_what_was_cancelled_is_not_done_and_holds_up_nobody(thread, gate):
    asked = []
    jobs = [thread.submit_for("alice", lambda i=i: asked.append(i)) for i in range(5)]
    assert all(job.cancel() for job in jobs[:4])
    gate.set()
    jobs[4].result(10)
    assert asked == [4]


def test_a_failure_is_told_to_whoever_asked_and_to_nobody_else(thread):
    with pytest.raises(ZeroDivisionError):
        thread.submit_for("alice", lambda: 1 / 0).result(10)
    assert thread.submit_for("alice", lambda: "well").result(10) == "well"


def test_what_waits_for_the_same_work_is_done_in_one_call(thread, gate):
    calls = []

    def double(numbers):
        calls.append(list(numbers))
        return [2 * number for number in numbers]

    jobs = [thread.submit_among("alice", double, number) for number in range(3)]
    other = thread.submit_among("bob", double, 10)
    assert jobs[1].cancel()
    between = thread.submit_for("alice", lambda: calls.append("between"))
    last = thread.submit_among("alice", double, 3)
    gate.set()
    assert [jobs[0].result(10), jobs[2].result(10), other.result(10), last.result(10)] == [0, 4, 20, 6]
    assert between.done()
    assert calls == [[0, 2], [10], "between", [3]]


def test_a_flood_is_done_in_pieces_between_which_others_have_their_turn(thread, gate):
    calls = []

    def note(names):
        calls.append(set(names))
        return names

    flood = [thread.submit_among("flood", note, "flood") for _ in range(100)]
    for _ in range(2):
        last = thread.submit_among("alice", note, "alice")
    gate.set()
    assert {job.result(10) for job in (*flood, last)} == {"flood", "alice"}
    assert calls[:3] == [{"flood"}, {"alice"}, {"flood"}]


def test_a_failure_of_what_is_done_together_is_told_to_all_of_them(thread, gate):
    def fail(numbers):
        raise ZeroDivisionError

    jobs = [thread.submit_among("alice", fail, number) for number in range(2)]
    gate.set()
    for job in jobs:
        with pytest.raises(ZeroDivisionError):
            job.result(10)
