"""Batches in the store: held by one at a time, and each line ended once, whoever dies when."""

import tempfile
import threading
import tracemalloc

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sqlalchemy import func, select, update

from penstock.errors import BatchNotFound, RequestError, StorageFull
from penstock.store import batch_work
from penstock.store import batches as batches_module
from penstock.store.batch_work import HOLD_SECONDS, BatchWork, HoldLost, NewRow, RowEnd
from penstock.store.batches import BatchStore, InputError, NewBatch
from penstock.store.database import Database
from penstock.store.files import FileStore
from penstock.store.ledger import UsageLedger, day_of
from penstock.store.schema import batch_rows
from penstock.tenants import Usage
from tests.unit.store.conftest import NOON, Clock, after_each_transaction

WINDOW_SECONDS = 24 * 3600.0
NUM_LINES = 6


def new_batch(**changes):
    values = {
        "endpoint": "/v1/completions", "model": "tiny", "input_file_id": "file-1", "completion_window": "24h",
        "window_seconds": WINDOW_SECONDS, "labels": None, **changes,
    }  # fmt: skip
    return NewBatch(**values)


def anything(tenant, model):
    return True


def rows(count):
    return iter([NewRow(number, f"id{number}", "{}") for number in range(1, count + 1)])


def end(line, *, is_completed=True, tenant="alice"):
    usage = Usage(tenant=tenant, model="tiny", day=day_of(NOON), requests=1, output_tokens=3)
    return RowEnd(line=line, is_completed=is_completed, result=f"result {line}", usage=usage)


@pytest.fixture
def work(sqlite_database):
    return BatchWork(sqlite_database)


@pytest.fixture
def store(sqlite_database):
    return BatchStore(sqlite_database)


def started(store, work, count=3, tenant="alice"):
    """A batch in progress, held."""
    store.create(tenant, new_batch())
    held = work.take(anything)
    work.start(held, rows(count))
    return work.renew(held)[0]


def finished(store, work, files, held):
    held = work.close(held)
    file_id = files.begin(held.tenant, "output", "batch_output")
    lines = [
        row.result or f"unrun {row.line}" for kind in (True, False) for row in work.ended_rows(held, completed=kind)
    ]
    size = files.fill(file_id, [text.encode() + b"\n" for text in lines])
    return work.finish(held, (file_id, size), None)


def ledger_requests(database, tenant="alice"):
    return sum(entry.requests for entry in UsageLedger(database).read(tenant=tenant))


def test_a_batch_runs_to_its_end_on_either_database(any_database):
    store, work, files = BatchStore(any_database), BatchWork(any_database), FileStore(any_database)
    held = started(store, work)
    assert [row.line for row in work.claim(held, 2)] == [1, 2]
    assert [row.line for row in work.claim(held, 9)] == [3]
    assert len(work.record(held, [end(1), end(2, is_completed=False)])) == 2
    work.give_back(held, [3], counts=True)
    (again,) = work.claim(held, 9)
    assert (again.line, again.attempts) == (3, 2)
    work.record(held, [end(3)])
    ended = finished(store, work, files, held)
    assert (ended.status, ended.num_rows, ended.num_completed, ended.num_failed) == ("completed", 3, 2, 1)
    assert b"".join(files.read(ended.output_file_id)) == b"result 1\nresult 3\nresult 2\n"
    assert ledger_requests(any_database) == 3
    assert work.take(anything) is None


def test_what_is_recorded_twice_counts_once(store, work, sqlite_database):
    held = started(store, work)
    work.claim(held, 3)
    assert len(work.record(held, [end(1), end(2)])) == 2
    assert [taken.line for taken in work.record(held, [end(1), end(3)])] == [3]
    assert ledger_requests(sqlite_database) == 3
    assert store.find("alice", held.id).num_completed == 3


def test_a_line_that_nobody_runs_cannot_end(store, work, sqlite_database):
    held = started(store, work)
    assert work.record(held, [end(1)]) == []
    assert ledger_requests(sqlite_database) == 0


def test_nobody_takes_what_is_held_until_the_hold_runs_out(store, work, clock):
    held = started(store, work)
    clock.now += HOLD_SECONDS - 0.1
    assert work.take(anything) is None
    work.renew(held)
    clock.now += HOLD_SECONDS - 0.1
    assert work.take(anything) is None
    clock.now += 0.2
    assert work.take(anything).id == held.id


def test_who_was_overtaken_can_change_nothing(store, work, clock, sqlite_database):
    held = started(store, work)
    work.claim(held, 3)
    clock.now += HOLD_SECONDS
    other = work.take(anything)
    for attempt in (
        lambda: work.renew(held),
        lambda: work.claim(held, 1),
        lambda: work.record(held, [end(1)]),
        lambda: work.give_back(held, [1], counts=True),
        lambda: work.begin_ending(held),
        lambda: work.close(held),
        lambda: work.finish(held, None, None),
        lambda: work.reject(held, []),
        lambda: work.let_go(held),
    ):
        with pytest.raises(HoldLost):
            attempt()
    assert ledger_requests(sqlite_database) == 0
    assert [row.attempts for row in work.claim(other, 9)] == [2, 2, 2], "what was running runs again, and that counts"


def test_what_is_let_go_can_be_taken_at_once_and_was_not_tried(store, work):
    held = started(store, work)
    work.claim(held, 2)
    work.let_go(held)
    other = work.take(anything)
    assert [row.attempts for row in work.claim(other, 9)] == [1, 1, 1]


def test_ends_that_were_begun_are_counted_over_all_holders_but_not_those_of_who_let_go(store, work, clock):
    held = started(store, work)
    assert work.begin_ending(held) == 1
    work.let_go(held, is_ending=True)
    held = work.take(anything)
    assert work.begin_ending(held) == 1
    clock.now += HOLD_SECONDS
    held = work.take(anything)
    assert work.begin_ending(held) == 2


def test_who_let_go_holds_no_more_even_by_what_it_began_before(store, work):
    held = started(store, work)
    work.let_go(held)
    with pytest.raises(HoldLost):
        work.renew(held)
    assert work.take(anything) is not None


def test_a_clock_set_back_keeps_no_batch_for_ever(store, work, clock):
    started(store, work)
    clock.now -= 3600
    assert work.take(anything) is not None


def test_batches_are_taken_oldest_first_and_those_of_other_tenants_too(store, work, clock):
    for tenant in ("alice", "alice", "bob"):
        store.create(tenant, new_batch())
        clock.now += 1
    first = work.take(anything)
    assert (first.tenant, work.take(anything, {"alice"}).tenant) == ("alice", "bob")
    assert work.take(lambda tenant, model: model == "other") is None


def test_a_file_that_is_half_read_is_read_again_from_its_beginning(store, work, clock):
    def failing():
        yield from rows(600)
        raise KeyboardInterrupt

    store.create("alice", new_batch())
    held = work.take(anything)
    with pytest.raises(KeyboardInterrupt):
        work.start(held, failing())
    clock.now += HOLD_SECONDS
    other = work.take(anything)
    assert other.status == "validating"
    work.start(other, rows(700))
    assert work.renew(other)[0].num_rows == 700


def test_a_wrong_file_ends_its_batch(store, work):
    batch = store.create("alice", new_batch())
    work.reject(work.take(anything), [InputError("duplicate_custom_id", "twice", 7)])
    ended = store.find("alice", batch.id)
    assert (ended.status, ended.errors[0].line) == ("failed", 7)
    assert work.take(anything) is None


def test_cancelling_keeps_what_is_finished_and_tells_the_rest(store, work, sqlite_database):
    held = started(store, work)
    work.claim(held, 2)
    work.record(held, [end(1)])
    assert store.cancel("alice", held.id).status == "cancelling"
    assert work.renew(held)[0].status == "cancelling"
    ended = finished(store, work, FileStore(sqlite_database), held)
    assert (ended.status, ended.num_completed, ended.num_failed) == ("cancelled", 1, 2)
    with pytest.raises(RequestError, match="cancelled"):
        store.cancel("alice", held.id)


def test_a_batch_cancelled_before_its_file_was_read_ends_too(store, work, sqlite_database):
    batch = store.create("alice", new_batch())
    store.cancel("alice", batch.id)
    held = work.take(anything)
    assert finished(store, work, FileStore(sqlite_database), held).status == "cancelled"


def test_a_batch_whose_window_ended_is_expired(store, work, clock, sqlite_database):
    held = started(store, work)
    work.claim(held, 1)
    work.record(held, [end(1)])
    assert not work.renew(held)[1]
    clock.now += WINDOW_SECONDS
    assert work.renew(held)[1]
    assert finished(store, work, FileStore(sqlite_database), held).status == "expired"


def count_rows(database):
    with database.reading() as connection:
        return connection.execute(select(func.count()).select_from(batch_rows)).scalar_one()


def watch_rows(monkeypatch):
    """Return how many open lines, and lines at all, there are after each transaction from now on."""
    counts = []

    def count_lines(connection):
        states = connection.execute(select(batch_rows.c.state)).scalars().all()
        counts.append((sum(state in ("waiting", "running") for state in states), len(states)))

    after_each_transaction(monkeypatch, count_lines)
    monkeypatch.setattr(batch_work, "_PAGE_ROWS", 4)
    return counts


@pytest.mark.parametrize("how", ["closed", "rejected", "read again"])
def test_many_lines_end_in_many_small_transactions(store, work, sqlite_database, monkeypatch, how):
    held = started(store, work, count=19)
    work.claim(held, 3)
    counts = watch_rows(monkeypatch)
    if how == "closed":
        ended = finished(store, work, FileStore(sqlite_database), held)
        assert (ended.status, ended.num_failed) == ("expired", 19)
    elif how == "rejected":
        work.reject(held, [InputError("wrong", "it is wrong")])
    else:
        work.start(held, rows(2))
    steps = zip([(19, 19), *counts], counts, strict=False)
    assert all(before - after <= 4 for pair in steps for before, after in zip(*pair, strict=True))
    assert count_rows(sqlite_database) == (2 if how == "read again" else 0)


def test_lines_that_a_killed_process_left_behind_an_ended_batch_are_swept_away(
    store, work, sqlite_database, monkeypatch
):
    held, kept = started(store, work), started(store, work, tenant="bob")
    with monkeypatch.context() as patched:
        patched.setattr(BatchWork, "_forget_rows", lambda *_: None)  # killed before
        finished(store, work, FileStore(sqlite_database), held)
    assert count_rows(sqlite_database) == 6
    work.sweep()
    assert count_rows(sqlite_database) == 3
    assert len(work.claim(kept, 5)) == 3


def test_a_batch_that_is_over_is_anybodys_to_end_and_no_other(store, work, clock):
    def nothing(tenant, model):
        return False

    cancelled, other = store.create("alice", new_batch()), store.create("bob", new_batch())
    assert work.take(nothing) is None
    store.cancel("alice", cancelled.id)
    assert work.take(nothing).id == cancelled.id
    assert work.take(nothing) is None
    clock.now += WINDOW_SECONDS
    assert work.take(nothing, besides=["alice"]).id == other.id


def test_however_long_lines_are_few_of_them_are_in_memory_at_once(store, work, sqlite_database):
    count, length = 200, 256 * 1024
    store.create("alice", new_batch())
    held = work.take(anything)
    tracemalloc.start()
    try:
        work.start(held, (NewRow(number, f"id{number}", f"{number % 10}" * length) for number in range(1, count + 1)))
        with sqlite_database.writing() as connection:
            connection.execute(update(batch_rows).values(state="completed", result=batch_rows.c.body, body=""))
        lines = [(row.line, row.result[0]) for row in work.ended_rows(held, completed=True)]
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert lines == [(number, f"{number % 10}") for number in range(1, count + 1)]
    assert most_bytes < count * length / 2


def test_a_tenant_has_only_so_many_open_batches(store, monkeypatch):
    monkeypatch.setattr(batches_module, "MAX_OPEN_BATCHES", 2)
    for _ in range(2):
        store.create("alice", new_batch())
    with pytest.raises(StorageFull):
        store.create("alice", new_batch())
    store.create("bob", new_batch())


def test_another_tenants_batch_is_not_there(store):
    batch = store.create("alice", new_batch())
    with pytest.raises(BatchNotFound):
        store.find("bob", batch.id)


# ---------------------------------------------------------------- whoever dies when


class Holders(RuleBasedStateMachine):
    """Three holders that run lines, stall, die and come back, on a clock that jumps: each line ends once."""

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.folder = tempfile.TemporaryDirectory()
        self.database = Database.open(f"{self.folder.name}/penstock.db", clock=self.clock)
        self.store, self.work, self.files = (kind(self.database) for kind in (BatchStore, BatchWork, FileStore))
        self.batch = self.store.create("alice", new_batch())
        self.held = dict.fromkeys(range(3))
        self.running = {number: [] for number in range(3)}
        self.results = {}
        self.ended = None

    def one_of(self, pick, *, runs=False, free=False):
        """Choose among the holders that can do something."""
        able = [who for who in range(3) if (self.held[who] is None) == free and (not runs or bool(self.running[who]))]
        return able[pick % len(able)] if able else None

    def attempt(self, who, step):
        """Do a holder's step; one that was overtaken learns so."""
        try:
            return step(self.held[who])
        except HoldLost:
            self.held[who], self.running[who] = None, []
            return None

    pick = st.integers(0, 5)

    @rule(pick=pick, waits=st.booleans())
    def take(self, pick, waits):
        who = self.one_of(pick, free=True)
        if who is None:
            return
        if waits:  # a holder that stalls does not notice
            self.clock.now += HOLD_SECONDS
        self.held[who] = self.work.take(anything)
        if self.held[who] is not None and self.held[who].status == "validating":
            self.attempt(who, lambda held: self.work.start(held, rows(NUM_LINES)))

    @rule(pick=pick)
    @precondition(lambda self: any(self.held.values()))
    def be_killed(self, pick):
        who = self.one_of(pick)
        self.held[who], self.running[who] = None, []

    @rule(pick=pick, seconds=st.floats(0, HOLD_SECONDS / 2))
    @precondition(lambda self: any(self.held.values()))
    def renew(self, pick, seconds):
        self.clock.now += seconds
        who = self.one_of(pick)
        self.held[who] = (self.attempt(who, self.work.renew) or (None,))[0]

    @rule(pick=pick, count=st.integers(1, 4))
    @precondition(lambda self: any(self.held.values()))
    def claim(self, pick, count):
        who = self.one_of(pick)
        claimed = self.attempt(who, lambda held: self.work.claim(held, count))
        self.running[who] += claimed or []

    @rule(pick=pick, count=st.integers(1, 4), is_completed=st.booleans(), repeats=st.booleans())
    @precondition(lambda self: any(self.running.values()))
    def record(self, pick, count, is_completed, repeats):
        who = self.one_of(pick, runs=True)
        ends = [end(row.line, is_completed=is_completed) for row in self.running[who][:count]]
        self.running[who] = self.running[who][count:]
        for _ in range(1 + repeats):  # a commit whose answer was lost is tried again
            for taken in (self.held[who] and self.attempt(who, lambda held: self.work.record(held, ends))) or []:
                assert taken.line not in self.results, "a line ended twice"
                self.results[taken.line] = taken.is_completed

    @rule(pick=pick, counts=st.booleans())
    @precondition(lambda self: any(self.running.values()))
    def give_back(self, pick, counts):
        who = self.one_of(pick, runs=True)
        lines = [row.line for row in self.running[who]]
        self.running[who] = []
        self.attempt(who, lambda held: self.work.give_back(held, lines, counts=counts))

    @rule()
    @precondition(lambda self: self.ended is None and len(self.results) > 1)
    def cancel(self):
        self.store.cancel("alice", self.batch.id)

    @rule(pick=pick)
    @precondition(lambda self: len(self.results) > 1 and any(self.held.values()))
    def finish(self, pick):
        who = self.one_of(pick)
        ended = self.attempt(who, lambda held: finished(self.store, self.work, self.files, held))
        if ended is not None:
            assert self.ended is None, "a batch ended twice"
            self.ended, self.held[who], self.running[who] = ended, None, []

    def teardown(self):
        """Whatever happened: whoever comes next brings the batch to its end, with every line."""
        try:
            self.clock.now += HOLD_SECONDS
            held = self.work.take(anything)
            if held is not None:
                if held.status == "validating":
                    self.work.start(held, rows(NUM_LINES))
                lines = [row.line for row in self.work.claim(held, NUM_LINES)]
                taken = self.work.record(held, [end(line) for line in lines])
                assert not {item.line for item in taken} & set(self.results)
                self.results |= {item.line: True for item in taken}
                self.ended = finished(self.store, self.work, self.files, held)
                assert self.ended.status == "cancelled" or len(self.results) == NUM_LINES or held.status == "finalizing"
            self.the_books_agree()
        finally:
            self.database.close()
            self.folder.cleanup()

    @invariant()
    def the_books_agree(self):
        seen = self.store.find("alice", self.batch.id)
        assert seen.num_completed == sum(self.results.values())
        assert ledger_requests(self.database) == len(self.results)
        if self.ended is None:
            assert seen.num_failed in (len(self.results) - seen.num_completed, NUM_LINES - seen.num_completed)
            return
        assert seen.num_completed + seen.num_failed == NUM_LINES
        lines = b"".join(self.files.read(seen.output_file_id)).decode().split("\n")[:-1]
        expected = [f"{'result' if number in self.results else 'unrun'} {number}" for number in range(1, NUM_LINES + 1)]
        assert sorted(lines) == sorted(expected), "every line is told once"


TestHolders = Holders.TestCase
# Without shrinking, which takes minutes here.
TestHolders.settings = settings(max_examples=25, stateful_step_count=30, deadline=None, phases=[Phase.generate])


def test_of_many_at_once_one_gets_the_batch(any_location):
    databases = [Database.open(any_location) for _ in range(6)]
    BatchStore(databases[0]).create("alice", new_batch())
    taken = []
    barrier = threading.Barrier(len(databases))

    def take(database):
        barrier.wait()
        found = BatchWork(database).take(anything)
        if found is not None:
            taken.append(found)

    threads = [threading.Thread(target=take, args=(database,)) for database in databases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for database in databases:
        database.close()
    assert len(taken) == 1
