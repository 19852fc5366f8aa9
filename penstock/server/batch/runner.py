"""Works on batches in one API worker: takes what nobody holds, and runs a few side by side.

One batch of a tenant at a time, so that one tenant's many do not keep others' waiting. Any number of workers and
servers on one store may do this; a batch is held by one. Knows nothing of what is in a batch.
"""

import asyncio
import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor

from penstock.errors import StoreUnavailable
from penstock.server.batch.held_batch import HeldBatch
from penstock.server.batch.window import Window
from penstock.server.context import ServerContext
from penstock.store.batch_work import BatchWork
from penstock.store.batches import StoredBatch
from penstock.store.database import Database
from penstock.store.files import FileStore
from penstock.telemetry import log_event

POLL_SECONDS = 0.5
# Each time that there is nothing to do the next look comes later, up to so many times: a look is a query.
_IDLE_TIMES = 8
_SWEEP_SECONDS = 600.0
_MAX_HELD = 4
# ... and beside them so many that wait for their tenant's limit, perhaps until midnight: a place is for who can run.
_MAX_RESTING = 60

log = logging.getLogger("penstock.batch")


class BatchRunner:
    """Make it, `start` it in an event loop, and `close` it there before the store."""

    def __init__(self, context: ServerContext, database: Database, *, poll_seconds: float = POLL_SECONDS) -> None:
        self._context = context
        self._work = BatchWork(database)
        self._files = FileStore(database)
        # For each batch one that reads or writes files, and one that holds on to it meanwhile.
        self._threads = ThreadPoolExecutor(2 * _MAX_HELD, thread_name_prefix="batches")
        self._poll_seconds = poll_seconds
        self._window = Window()
        self._held: dict[asyncio.Task[None], HeldBatch] = {}
        self._task: asyncio.Task[None] | None = None
        self._is_failing = False
        self._is_closing = False
        self._swept_at = time.monotonic()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Let go of every batch, so that others go on with it at once."""
        # The loop ends by itself: cancelled while the store is asked, it would never hear of a batch that it was given.
        self._is_closing = True
        self._context.new_batch.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        for held in self._held.values():
            held.stop()
        await asyncio.gather(*self._held, return_exceptions=True)
        self._threads.shutdown()

    async def _run(self) -> None:
        pause = self._poll_seconds
        while not (self._is_closing or self._context.answers.draining):
            for task in [task for task in self._held if task.done()]:
                del self._held[task]
                _report(task)
            if self._has_place and self._context.engine.connected:
                batch = await self._take()
                if batch is not None:
                    self._hold(batch)
                    pause = self._poll_seconds
                    continue
            if await self._is_called_within(pause) or self._held:
                pause = self._poll_seconds
            else:
                pause = min(2 * pause, _IDLE_TIMES * self._poll_seconds)

    @property
    def _num_active(self) -> int:
        return sum(not held.is_resting for held in self._held.values())

    @property
    def _has_place(self) -> bool:
        return self._num_active < _MAX_HELD and len(self._held) < _MAX_HELD + _MAX_RESTING

    async def _is_called_within(self, seconds: float) -> bool:
        """Wait so long, or until this worker has taken a batch in."""
        called = self._context.new_batch
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await called.wait()
        was_called = called.is_set()
        called.clear()
        return was_called

    def _hold(self, batch: StoredBatch) -> None:
        held = HeldBatch(
            batch,
            self._context,
            self._work,
            self._files,
            threads=self._threads,
            window=self._window,
            share=lambda: max(1, self._window.size // max(1, self._num_active)),
        )
        self._held[asyncio.create_task(held.run())] = held

    async def _take(self) -> StoredBatch | None:
        tenants = {held.batch.tenant for held in self._held.values()}
        try:
            await self._sweep()  # first: what is taken must not be lost by its failing
            found = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._work.take, self._is_ours, tenants
            )
        except StoreUnavailable as error:
            self._context.metrics.count_store_failure()
            if not self._is_failing:
                log_event(log, f"no batch is worked on for now: {error}", level=logging.ERROR)
            self._is_failing = True
            return None
        self._is_failing = False
        return found

    async def _sweep(self) -> None:
        if time.monotonic() - self._swept_at > _SWEEP_SECONDS:
            self._swept_at = time.monotonic()
            for sweep in (self._files.sweep, self._work.sweep):
                await asyncio.get_running_loop().run_in_executor(self._threads, sweep)

    def _is_ours(self, tenant: str, model: str | None) -> bool:
        """Whether the model is served here, and its tenant known. What names no model anybody may turn down."""
        if self._context.tenancy.ring.caller_named(tenant) is None:
            return False
        return model is None or model in self._context.served_names


def _report(task: "asyncio.Task[None]") -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("a batch could not be worked on, and will be tried again", exc_info=error)
