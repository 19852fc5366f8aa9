"""One batch while this worker holds it: from its file to its results.

Begins wherever the holder before was stopped. Leaves early, and lets others go on, when the hold is lost or the server
drains. Knows nothing of other batches but how many share the window.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from penstock.errors import StoreUnavailable, UploadNotFound
from penstock.protocol.openai_files import OUTPUT_PURPOSE
from penstock.server.batch.input_file import InputFile
from penstock.server.batch.line_run import Postponed, count_answers, result_line, run_line
from penstock.server.batch.window import Window
from penstock.server.context import ServerContext
from penstock.store.batch_work import RENEW_SECONDS, BatchWork, HoldLost, RowEnd, RunningRow
from penstock.store.batches import InputError, StoredBatch
from penstock.store.files import FileStore
from penstock.store.quotas import Spent
from penstock.telemetry import log_event

Result = TypeVar("Result")

_RETRY_SECONDS = 1.0
_LOOK_SECONDS = 0.25
# So many begin together: between them the event loop is others'.
_MOST_LINES = 32
# A batch whose file was begun to be read by so many holders, none of whom got to its end, is given up.
_MOST_READINGS = 10
# So is one whose results were begun to be written so often.
_MOST_ENDINGS = 10
# A day's tokens may be used up for hours; but a limit may be raised, and the batch cancelled.
_LONGEST_PAUSE = 30.0

_UNREADABLE = (
    f"the server failed {_MOST_READINGS} times while it read the input file; create the batch again, "
    "and tell whoever runs the server if that fails too"
)

_UNWRITABLE = (
    f"the server failed {_MOST_ENDINGS} times while it wrote the files of results; create the batch again, "
    "and tell whoever runs the server if that fails too"
)

log = logging.getLogger("penstock.batch")


class HeldBatch:
    """Make it, and `run` it once. `share` says how many answers it may have under way now."""

    def __init__(
        self,
        batch: StoredBatch,
        context: ServerContext,
        work: BatchWork,
        files: FileStore,
        *,
        threads: Executor,
        window: Window,
        share: Callable[[], int],
    ) -> None:
        self.batch = batch
        self._context = context
        self._work = work
        self._files = files
        self._threads = threads
        self._window = window
        self._share = share
        self._running: dict[asyncio.Task[RowEnd | Postponed], int] = {}  # lines and how many answers each has
        self._most_answers: int | None = None  # of one line, as far as lines were seen
        self._is_over = False  # cancelled or expired
        self._is_ending = False  # its results are being written
        self._paused_until = 0.0  # on the monotonic clock
        self._wake = asyncio.Event()
        self._stop = asyncio.get_running_loop().create_future()

    @property
    def num_running(self) -> int:
        """Answers under way."""
        return sum(self._running.values())

    @property
    def is_resting(self) -> bool:
        """Whether nothing of it runs, and nothing may for now: a limit is used up, or its tenant's key is gone."""
        return not self._running and time.monotonic() < self._paused_until

    async def run(self) -> None:
        """Work until the batch has ended, is no longer ours, or `stop` was called: then it lets go of the batch.

        What fails in a way that nobody foresaw stays held until the hold runs out: others go first.
        """
        keeper = asyncio.create_task(self._keep_hold())
        worker = asyncio.create_task(self._work_through())
        lets_go = True
        try:
            await asyncio.wait((keeper, worker, self._stop), return_when=asyncio.FIRST_COMPLETED)
            if worker.done():
                lets_go = False
                lets_go = not worker.result()
            elif keeper.done():
                keeper.result()
        except HoldLost:
            log_event(log, "a batch was taken over by another", level=logging.WARNING, batch=self.batch.id)
            lets_go = False
        finally:
            for task in (keeper, worker, *self._running):
                task.cancel()
            await asyncio.gather(keeper, worker, *self._running, return_exceptions=True)
            if lets_go:
                await self._let_go()

    def stop(self) -> None:
        """Have `run` let go. Cancelling it may do so too late, when it lets go already."""
        if not self._stop.done():
            self._stop.set_result(None)

    async def _work_through(self) -> bool:
        """Bring the batch to its end; False: it has not ended, and another must go on."""
        await self._renew()  # first: of one that is over no line may begin
        if self._is_unread and not await self._validate():
            return True
        if self.batch.status == "in_progress":
            await self._run_lines()
            if not self._is_over and self._context.answers.draining:
                return False
        await self._finish()
        return True

    @property
    def _is_unread(self) -> bool:
        """Whether its lines are still to be written down, if only to tell of each that it was cancelled."""
        return self.batch.status in ("validating", "cancelling") and not self.batch.num_rows

    # ------------------------------------------------------------ holding on

    async def _keep_hold(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            await self._renew()

    async def _renew(self) -> None:
        batch, is_expired = await self._ask(lambda: self._work.renew(self.batch))
        if batch.status == "cancelling" or is_expired:
            self._is_over = True
            self._wake.set()

    async def _let_go(self) -> None:
        # If this fails others wait until the hold runs out.
        let_go = partial(self._work.let_go, self.batch, is_ending=self._is_ending)
        with contextlib.suppress(HoldLost, StoreUnavailable):
            await asyncio.get_running_loop().run_in_executor(self._threads, let_go)

    async def _ask(self, work: Callable[[], Result]) -> Result:
        """Have the store do something, again and again while it fails. Raises HoldLost."""
        while True:
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
            except StoreUnavailable:
                self._context.metrics.count_store_failure()
                await asyncio.sleep(_RETRY_SECONDS)

    # ------------------------------------------------------------ the three parts of a batch's life

    async def _validate(self) -> bool:
        """Turn the file into rows, or the batch down; whether it goes on."""
        errors = await self._ask(self._read_input)
        if errors and self.batch.status == "cancelling":
            return True  # nobody wants to know
        if errors:
            await self._ask(lambda: self._work.reject(self.batch, errors))
            self._note_end("failed")
            return False
        self.batch, _ = await self._ask(lambda: self._work.renew(self.batch))
        return True

    def _read_input(self) -> list[InputError]:
        batch, limit = self.batch, self._context.config.max_body_bytes
        if batch.term > _MOST_READINGS:
            return [InputError("file_unreadable", _UNREADABLE)]
        try:
            # Twice, so that not one row is written of a file that is wrong.
            trial = InputFile(self._files.read(batch.input_file_id), batch.endpoint, batch.model, limit)
            for _ in trial.rows():
                pass
            if not trial.errors:
                again = InputFile(self._files.read(batch.input_file_id), batch.endpoint, batch.model, limit)
                self._work.start(batch, again.rows())
            return trial.errors
        except UploadNotFound:
            return [InputError("file_not_found", "the input file was deleted before it was read")]

    async def _run_lines(self) -> None:
        """Run what waits. Returns when all lines have ended, or the batch is over, or the server drains."""
        has_more = True
        while not self._must_stop and (has_more or self._running):
            room = self._share() - self.num_running
            self._window.look(time.monotonic(), self._context.engine.stats.num_waiting, is_full=room <= 0)
            if has_more and room > 0 and self._can_run():
                has_more = await self._start_lines()
            has_more = await self._settle(await self._next_ended()) or has_more
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._settle([task for task in self._running if not task.cancelled()])

    async def _finish(self) -> None:
        num_begun = await self._ask(lambda: self._work.begin_ending(self.batch))
        self._is_ending = True
        if num_begun > _MOST_ENDINGS:
            await self._ask(lambda: self._work.reject(self.batch, [InputError("results_unwritable", _UNWRITABLE)]))
            self._note_end("failed")
            return
        self.batch = await self._ask(lambda: self._work.close(self.batch))
        self.batch = await self._ask(self._write_results)
        self._note_end(self.batch.status)

    def _write_results(self) -> StoredBatch:
        batch, begun = self.batch, list[str]()
        try:
            output = self._write_file("output", begun, completed=True) if batch.num_completed else None
            error = self._write_file("error", begun, completed=False) if batch.num_failed else None
        except BaseException:
            # Whoever tries again begins anew: what is half written would only fill the disk for a day.
            for file_id in begun:
                with contextlib.suppress(StoreUnavailable):
                    self._files.give_up(file_id)
            raise
        return self._work.finish(batch, output, error)

    def _write_file(self, name: str, begun: list[str], *, completed: bool) -> tuple[str, int]:
        batch = self.batch
        file_id = self._files.begin(batch.tenant, f"{batch.id}_{name}.jsonl", OUTPUT_PURPOSE)
        begun.append(file_id)
        is_cancelled = batch.status == "cancelling"
        rows = self._work.ended_rows(batch, completed=completed)
        return file_id, self._files.fill(
            file_id, (result_line(batch.id, row, is_cancelled=is_cancelled) for row in rows)
        )

    def _note_end(self, status: str) -> None:
        self._context.metrics.count_batch(status)
        batch = self.batch
        log_event(
            log,
            "a batch ended",
            batch=batch.id,
            tenant=batch.tenant,
            status=status,
            completed=batch.num_completed,
            failed=batch.num_failed,
        )

    # ------------------------------------------------------------ lines

    @property
    def _must_stop(self) -> bool:
        return self._is_over or self._context.answers.draining

    def _can_run(self) -> bool:
        return time.monotonic() >= self._paused_until and self._context.engine.connected

    async def _start_lines(self) -> bool:
        """Begin lines while there is room for their answers, as far as those before tell; whether there may be more."""
        caller = self._context.tenancy.ring.caller_named(self.batch.tenant)
        if caller is None:
            # The key was revoked: nothing of it runs. It may be known elsewhere, and else will expire.
            self._paused_until = time.monotonic() + RENEW_SECONDS
            return True
        while (room := self._share() - self.num_running) > 0:
            wanted = 1 if self._most_answers is None else max(1, room // self._most_answers)
            wanted = min(wanted, _MOST_LINES)
            rows, counts = await self._ask(partial(self._claim, wanted))
            for row, num_answers in zip(rows, counts, strict=True):
                line = run_line(self._context, caller, self.batch.id, self.batch.endpoint, row)
                self._running[asyncio.create_task(line)] = num_answers
            self._most_answers = max((self._most_answers or 1, *counts))
            if len(rows) < wanted:
                return False
        return True

    def _claim(self, num_lines: int) -> tuple[list[RunningRow], list[int]]:
        rows = self._work.claim(self.batch, num_lines)
        return rows, [count_answers(row.body) for row in rows]

    async def _next_ended(self) -> list["asyncio.Task[RowEnd | Postponed]"]:
        """Return the lines that have ended; wait for one for a moment, after which there may be more room."""
        self._wake.clear()
        waker = asyncio.create_task(self._wake.wait())
        try:
            await asyncio.wait((waker, *self._running), timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waker.cancel()
        return [task for task in self._running if task.done()]

    async def _settle(self, tasks: list["asyncio.Task[RowEnd | Postponed]"]) -> bool:
        """Record lines that have ended, all in one transaction; whether some must run again."""
        for task in tasks:
            del self._running[task]
        outcomes = [task.result() for task in tasks]
        ends = [outcome for outcome in outcomes if isinstance(outcome, RowEnd)]
        if ends:
            for end in await self._record(ends):
                self._context.metrics.count_batch_request("completed" if end.is_completed else "failed")
        postponed = [outcome for outcome in outcomes if isinstance(outcome, Postponed)]
        for counts in (True, False):
            lines = [outcome.line for outcome in postponed if outcome.counts is counts]
            if lines:
                await self._ask(partial(self._work.give_back, self.batch, lines, counts=counts))
        for outcome in postponed:
            self._context.metrics.count_batch_request("postponed")
            self._paused_until = max(self._paused_until, time.monotonic() + min(outcome.wait_seconds, _LONGEST_PAUSE))
        if any(outcome.is_crowded for outcome in postponed):
            self._window.shrink()
        return bool(postponed)

    async def _record(self, ends: list[RowEnd]) -> list[RowEnd]:
        try:
            return await self._ask(lambda: self._work.record(self.batch, ends))
        except HoldLost:
            # Their next run will be charged; what they had reserved is given back.
            for end in ends:
                if end.settlement is not None:
                    self._context.tenancy.meter.book(None, (end.settlement[0], Spent(requests=0)))
            raise
