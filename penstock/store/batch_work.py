"""Batches as those see them who work on them: held by one at a time, and each line ended exactly once.

A holder has the batch until `held_until`, and renews it. Whoever takes a batch over gets a larger term, and from then
on nothing that an earlier holder writes is taken. A line is waiting, running, or ended (completed, failed or unrun).
Its end, its result, the counts, the ledger and the tenant's limits change in one transaction: a line that ran and was
not recorded runs again, and its first run leaves no trace. Knows nothing of HTTP or the engine.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from sqlalchemy import ColumnElement, Connection, Select, delete, func, insert, select, update

from penstock.store.batches import OPEN_STATUSES, InputError, StoredBatch, change_status, stored_batch
from penstock.store.database import Database
from penstock.store.files import complete
from penstock.store.ledger import add_usage
from penstock.store.quotas import Lease, Spent, settle
from penstock.store.schema import batch_endings, batch_rows, batches
from penstock.tenants import Usage

# A batch whose holder was killed is taken over after this.
HOLD_SECONDS = 10.0
RENEW_SECONDS = 2.0
# A line that was under way so often when something died is not tried again: it may be the cause.
MAX_ATTEMPTS = 5

# In one transaction: nobody else writes meanwhile.
_PAGE_ROWS = 500
# In memory at once, and what was fetched beyond.
_PAGE_CHARACTERS = 8 * 1024**2
_FETCHED_ROWS = 16

# In these no line of a batch begins.
_OVER_STATUSES = ("finalizing", "cancelling")

# Whether this server works on batches of a tenant and model.
Wanted = Callable[[str, str | None], bool]


AnyRow = TypeVar("AnyRow")


class HoldLost(Exception):
    """Another has taken the batch over: whatever this holder still does is without effect."""


@dataclass(frozen=True, slots=True)
class NewRow:
    line: int
    custom_id: str
    body: str


@dataclass(frozen=True, slots=True)
class RunningRow:
    """A line to run now. `attempts` counts this one."""

    line: int
    custom_id: str
    body: str
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEnd:
    """How a line ended, and what it cost."""

    line: int
    is_completed: bool
    result: str  # its line of the output or error file
    usage: Usage | None = None
    settlement: tuple[Lease, Spent] | None = None


@dataclass(frozen=True, slots=True)
class EndedRow:
    """A line for the files that tell the results. Without `result` it never ran."""

    line: int
    custom_id: str
    is_completed: bool
    result: str | None


class BatchWork:
    def __init__(self, database: Database) -> None:
        self._database = database

    def take(self, wanted: Wanted, besides: Iterable[str] = ()) -> StoredBatch | None:
        """Hold the oldest open batch that nobody holds, of a tenant not in `besides`; None: there is none.

        One of which nothing more runs anybody can bring to its end, whether it is `wanted` or not.
        """
        passed = set(besides)
        with self._database.reading() as connection:
            found = connection.execute(self._unheld(connection)).mappings().all()
            now = self._database.now(connection)
        for row in found:
            is_over = row["status"] in _OVER_STATUSES or now >= row["expires_at"]
            if row["tenant"] not in passed and (is_over or wanted(row["tenant"], row["model"])):
                held = self._hold(row["id"])
                if held is not None:
                    return held
        return None

    def renew(self, held: StoredBatch) -> tuple[StoredBatch, bool]:
        """Hold on; return the batch as it is now, and whether its window has ended. Raises HoldLost."""
        with self._database.writing() as connection:
            batch = _lock(connection, held)
            now = self._database.now(connection)
            _keep(connection, batch, now + HOLD_SECONDS)
            return batch, now >= batch.expires_at

    def let_go(self, held: StoredBatch, *, is_ending: bool = False) -> None:
        """Let another take the batch at once. What is running did not run, nor was its end begun. Raises HoldLost."""
        with self._database.writing() as connection:
            batch = _lock(connection, held)
            _wait_again(connection, batch.id, None, counts=False)
            if is_ending:
                fewer = {"attempts": batch_endings.c.attempts - 1}
                connection.execute(update(batch_endings).where(batch_endings.c.batch_id == batch.id).values(fewer))
            # On new terms: what was begun on the old ones and comes later changes nothing any more.
            free = {"term": batch.term + 1, "held_until": 0.0}
            connection.execute(update(batches).where(batches.c.id == batch.id).values(free))

    # ------------------------------------------------------------ from a file to rows

    def start(self, held: StoredBatch, rows: Iterator[NewRow]) -> None:
        """Write the lines down and begin. Lines that a holder before had written are replaced. Raises HoldLost."""
        for _ in self._slices():
            with self._database.writing() as connection:
                _lock(connection, held)
                if not _remove_rows(connection, held.id):
                    break
        num_rows = 0
        for page in _pages(rows, lambda row: len(row.body)):
            values = [
                {"batch_id": held.id, "line": row.line, "custom_id": row.custom_id, "body": row.body,
                 "state": "waiting", "attempts": 0}
                for row in page
            ]  # fmt: skip
            with self._database.writing() as connection:
                batch = _lock(connection, held)
                _keep(connection, batch, self._database.now(connection) + HOLD_SECONDS)
                connection.execute(insert(batch_rows), values)
            num_rows += len(values)
        with self._database.writing() as connection:
            batch = _lock(connection, held)
            if batch.status == "validating":
                change_status(connection, batch, "in_progress", self._database.now(connection), num_rows=num_rows)
            else:  # cancelled meanwhile: its lines will be told as not run
                connection.execute(update(batches).where(batches.c.id == held.id).values(num_rows=num_rows))

    def reject(self, held: StoredBatch, errors: Sequence[InputError]) -> None:
        """End a batch as failed: its file is wrong, or its results cannot be told. Raises HoldLost."""
        with self._database.writing() as connection:
            batch = _lock(connection, held)
            if batch.status in OPEN_STATUSES:
                encoded = msgspec.json.encode(errors).decode()
                change_status(connection, batch, "failed", self._database.now(connection), errors=encoded)
                _forget_endings(connection, batch.id)
        self._database.flush()
        self._forget_rows(held.id)

    # ------------------------------------------------------------ running rows

    def claim(self, held: StoredBatch, count: int) -> list[RunningRow]:
        """Take up to `count` waiting lines to run, in order. Raises HoldLost."""
        columns = (batch_rows.c.line, batch_rows.c.custom_id, batch_rows.c.body, batch_rows.c.attempts)
        waiting = (batch_rows.c.batch_id == held.id) & (batch_rows.c.state == "waiting")
        wanted = select(*columns).where(waiting).order_by(batch_rows.c.line).limit(count)
        with self._database.writing() as connection:
            _lock(connection, held)
            rows = [
                RunningRow(row.line, row.custom_id, row.body, row.attempts + 1) for row in connection.execute(wanted)
            ]
            lines = [row.line for row in rows]
            running = {"state": "running", "attempts": batch_rows.c.attempts + 1}
            connection.execute(update(batch_rows).where(_of(held.id, lines)).values(running))
        return rows

    def record(self, held: StoredBatch, ends: Sequence[RowEnd]) -> list[RowEnd]:
        """End running lines, with everything that depends on it, in one transaction. Raises HoldLost.

        Returns those that were taken. One that had ended is not: recording again after a failure changes nothing.
        """
        with self._database.writing() as connection:
            _lock(connection, held)
            taken = [end for end in ends if _end_row(connection, held.id, end)]
            num_completed = sum(end.is_completed for end in taken)
            counts = {
                "num_completed": batches.c.num_completed + num_completed,
                "num_failed": batches.c.num_failed + len(taken) - num_completed,
            }
            connection.execute(update(batches).where(batches.c.id == held.id).values(counts))
            settle(self._database, connection, [end.settlement for end in taken if end.settlement is not None])
            add_usage(connection, [end.usage for end in taken if end.usage is not None])
            return taken

    def give_back(self, held: StoredBatch, lines: Sequence[int], *, counts: bool) -> None:
        """Let running lines wait again; unless it `counts`, as if they had not been tried. Raises HoldLost."""
        with self._database.writing() as connection:
            _lock(connection, held)
            _wait_again(connection, held.id, lines, counts=counts)

    # ------------------------------------------------------------ the end

    def begin_ending(self, held: StoredBatch) -> int:
        """Write down that the batch is being brought to its end; return for the how manieth time. Raises HoldLost."""
        mine = batch_endings.c.batch_id == held.id
        with self._database.writing() as connection:
            _lock(connection, held)
            before = connection.execute(select(batch_endings.c.attempts).where(mine)).scalar_one_or_none()
            if before is None:
                connection.execute(insert(batch_endings).values(batch_id=held.id, attempts=1))
                return 1
            connection.execute(update(batch_endings).where(mine).values(attempts=before + 1))
            return int(before) + 1

    def close(self, held: StoredBatch) -> StoredBatch:
        """End what has not run: it never will. Raises HoldLost."""
        waiting = (batch_rows.c.batch_id == held.id) & (batch_rows.c.state == "waiting")
        for _ in self._slices():
            with self._database.writing() as connection:
                batch = _lock(connection, held)
                _wait_again(connection, held.id, None, counts=True)
                some = _beginning(connection, waiting)
                if some is None:
                    if batch.status == "in_progress":
                        change_status(connection, batch, "finalizing", self._database.now(connection))
                    return _lock(connection, held)
                unrun = connection.execute(update(batch_rows).where(some).values(state="unrun", body="")).rowcount
                counted = {"num_failed": batch.num_failed + unrun}
                connection.execute(update(batches).where(batches.c.id == held.id).values(counted))
        raise AssertionError("slices have no end")

    def ended_rows(self, held: StoredBatch, *, completed: bool) -> Iterator[EndedRow]:
        """Yield the lines that belong into the output file, or those of the error file, in order."""
        states = ("completed",) if completed else ("failed", "unrun")
        last = 0
        while True:
            chosen = (batch_rows.c.batch_id == held.id) & batch_rows.c.state.in_(states) & (batch_rows.c.line > last)
            wanted = select(batch_rows).where(chosen).order_by(batch_rows.c.line).limit(_PAGE_ROWS)
            with self._database.reading() as connection:
                found = connection.execute(wanted, execution_options={"yield_per": _FETCHED_ROWS})
                ended = (EndedRow(row.line, row.custom_id, row.state == "completed", row.result) for row in found)
                page = next(_pages(ended, lambda row: len(row.result or "")), [])
                found.close()
            if not page:
                return
            yield from page
            last = page[-1].line

    def finish(self, held: StoredBatch, output: tuple[str, int] | None, error: tuple[str, int] | None) -> StoredBatch:
        """Show the files (their ids and sizes) and end the batch, in one transaction. Raises HoldLost.

        Done again after a failure it changes nothing of a batch that had ended: some of its lines may be gone by then.
        """
        with self._database.writing() as connection:
            batch = _lock(connection, held)
            if batch.status in OPEN_STATUSES:
                self._end(connection, batch, output, error)
            ended = _lock(connection, held)
        self._database.flush()
        self._forget_rows(held.id)
        return ended

    def _end(
        self, connection: Connection, batch: StoredBatch, output: tuple[str, int] | None, error: tuple[str, int] | None
    ) -> None:
        status = _last_status(connection, batch)
        for file in (output, error):
            if file is not None:
                complete(connection, *file)
        names = {
            "output_file_id": None if output is None else output[0],
            "error_file_id": None if error is None else error[0],
        }
        change_status(connection, batch, status, self._database.now(connection), **names)
        _forget_endings(connection, batch.id)

    def sweep(self) -> None:
        """Remove lines of batches that have ended, which a killed process left."""
        ended = ~batches.c.status.in_(OPEN_STATUSES)
        left = select(batch_rows.c.batch_id).join(batches, batches.c.id == batch_rows.c.batch_id).where(ended)
        with self._database.reading() as connection:
            found = connection.execute(left.distinct()).scalars().all()
        for batch_id in found:
            self._forget_rows(batch_id)

    def _forget_rows(self, batch_id: str) -> None:
        """Remove the lines of a batch that has ended."""
        for _ in self._slices():
            with self._database.writing() as connection:
                if not _remove_rows(connection, batch_id):
                    return

    @staticmethod
    def _slices() -> Iterator[None]:
        """Yield before each of many transactions; between two of them those who waited meanwhile come first."""
        while True:
            began = time.monotonic()
            yield
            time.sleep(time.monotonic() - began)

    # ------------------------------------------------------------ holding

    def _unheld(self, connection: Connection) -> Select[tuple[Any, ...]]:
        now = self._database.now(connection)
        # One held for longer than anybody may was held before the clock was set back.
        unheld = (batches.c.held_until <= now) | (batches.c.held_until > now + HOLD_SECONDS)
        free = batches.c.status.in_(OPEN_STATUSES) & unheld
        columns = (batches.c.id, batches.c.tenant, batches.c.model, batches.c.status, batches.c.expires_at)
        return select(*columns).where(free).order_by(batches.c.created_at, batches.c.id)

    def _hold(self, batch_id: str) -> StoredBatch | None:
        with self._database.writing() as connection:
            row = connection.execute(select(batches).where(batches.c.id == batch_id).with_for_update()).mappings().one()
            now = self._database.now(connection)
            is_held = now < row["held_until"] <= now + HOLD_SECONDS
            if is_held or row["status"] not in OPEN_STATUSES:
                return None
            term = {"term": row["term"] + 1, "held_until": now + HOLD_SECONDS}
            connection.execute(update(batches).where(batches.c.id == batch_id).values(term))
            _wait_again(connection, batch_id, None, counts=True)
            return stored_batch(dict(row) | term)


def _lock(connection: Connection, held: StoredBatch) -> StoredBatch:
    """Return the batch as it is, and keep others from it; raise unless it is still held on these terms."""
    wanted = select(batches).where(batches.c.id == held.id).with_for_update()
    row = connection.execute(wanted).mappings().first()
    if row is None or row["term"] != held.term:
        raise HoldLost
    return stored_batch(row)


def _keep(connection: Connection, batch: StoredBatch, until: float) -> None:
    connection.execute(update(batches).where(batches.c.id == batch.id).values(held_until=until))


def _of(batch_id: str, lines: Sequence[int]) -> ColumnElement[bool]:
    return (batch_rows.c.batch_id == batch_id) & batch_rows.c.line.in_(lines)


def _wait_again(connection: Connection, batch_id: str, lines: Sequence[int] | None, *, counts: bool) -> None:
    """Let these running lines wait (None: all that run)."""
    chosen = (batch_rows.c.batch_id == batch_id) if lines is None else _of(batch_id, lines)
    change = update(batch_rows).where(chosen & (batch_rows.c.state == "running")).values(state="waiting")
    connection.execute(change if counts else change.values(attempts=batch_rows.c.attempts - 1))


def _beginning(connection: Connection, chosen: ColumnElement[bool]) -> ColumnElement[bool] | None:
    """Return what chooses the first of these lines, no more than one transaction should change; None: there are none.

    They must be of one batch, and of one state or of any: so an index has their order.
    """
    some = select(batch_rows.c.line).where(chosen).order_by(batch_rows.c.line).limit(_PAGE_ROWS)
    last = connection.execute(select(func.max(some.subquery().c.line))).scalar_one()
    return None if last is None else chosen & (batch_rows.c.line <= last)


def _remove_rows(connection: Connection, batch_id: str) -> bool:
    """Remove some lines of a batch; return whether there were any."""
    some = _beginning(connection, batch_rows.c.batch_id == batch_id)
    if some is not None:
        connection.execute(delete(batch_rows).where(some))
    return some is not None


def _end_row(connection: Connection, batch_id: str, end: RowEnd) -> bool:
    """Write a line's result; False where the line was not running."""
    state = "completed" if end.is_completed else "failed"
    chosen = _of(batch_id, [end.line]) & (batch_rows.c.state == "running")
    change = update(batch_rows).where(chosen).values(state=state, result=end.result, body="")
    return connection.execute(change).rowcount == 1


def _forget_endings(connection: Connection, batch_id: str) -> None:
    connection.execute(delete(batch_endings).where(batch_endings.c.batch_id == batch_id))


def _last_status(connection: Connection, batch: StoredBatch) -> str:
    if batch.status == "cancelling":
        return "cancelled"
    unrun = (batch_rows.c.batch_id == batch.id) & (batch_rows.c.state == "unrun")
    num_unrun = connection.execute(select(func.count()).select_from(batch_rows).where(unrun)).scalar_one()
    return "expired" if num_unrun else "completed"


def _pages(rows: Iterator[AnyRow], characters: Callable[[AnyRow], int]) -> Iterator[list[AnyRow]]:
    page: list[AnyRow] = []
    num_characters = 0
    for row in rows:
        page.append(row)
        num_characters += characters(row)
        if len(page) == _PAGE_ROWS or num_characters >= _PAGE_CHARACTERS:
            yield page
            page, num_characters = [], 0
    if page:
        yield page
