"""Writes what requests used into the store: many in one transaction, and before their last byte is sent.

While one batch is being written the next gathers, so that a busy server writes no more often than the store allows and
a quiet one writes at once. A store that fails holds up no answer: what could not be written is kept and tried again.
Knows nothing of limits or HTTP.
"""

import asyncio
import logging
from concurrent.futures import Executor
from dataclasses import dataclass, field

import msgspec

from penstock.errors import StoreUnavailable
from penstock.metering.counts import StoreMetrics
from penstock.store.database import Database
from penstock.store.ledger import add_usage, merge_usage
from penstock.store.quotas import Lease, Spent, settle
from penstock.telemetry import log_event
from penstock.tenants import Usage

_RETRY_SECONDS = 1.0
_MAX_COUNT = 2**40  # more than a request can use; the sums of any number of such fit into every database

log = logging.getLogger("penstock.books")


@dataclass(slots=True)
class _Batch:
    usage: list[Usage] = field(default_factory=list)
    settlements: list[tuple[Lease, Spent]] = field(default_factory=list)
    waiters: list["asyncio.Future[None]"] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.usage or self.settlements)

    def release(self) -> None:
        """Let those go on that waited for this batch."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.waiters.clear()


class Books:
    def __init__(self, database: Database, thread: Executor, metrics: StoreMetrics) -> None:
        self._database = database
        self._thread = thread
        self._metrics = metrics
        self._next = _Batch()
        self._writing: asyncio.Task[None] | None = None
        self._is_failing = False

    def note(self, usage: Usage | None, settlement: tuple[Lease, Spent] | None) -> "asyncio.Future[None]":
        """Take an entry in; the result is there once it is written, or cannot be for now."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not (_is_possible(usage) and _is_possible(settlement[1] if settlement is not None else None)):
            self._drop(usage)
            usage = settlement = None  # with it the database would refuse all that is written together
        if usage is not None:
            self._next.usage.append(usage)
        if settlement is not None:
            self._next.settlements.append(settlement)
        self._next.waiters.append(waiter)
        if self._is_failing:
            self._next.release()
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all())
        return waiter

    async def close(self) -> None:
        """Write what is left, or give it up where the store still fails."""
        if self._writing is not None and not self._writing.done():
            if self._is_failing:
                self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        if self._next:
            log_event(log, "usage was lost: the store failed to the end", level=logging.ERROR)

    async def _write_all(self) -> None:
        while self._next:
            batch, self._next = self._next, _Batch()
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._write, batch)
                self._is_failing = False
            except StoreUnavailable as error:
                await self._keep(batch, error)
            finally:
                batch.release()

    def _write(self, batch: _Batch) -> None:
        with self._database.writing() as connection:
            settle(self._database, connection, batch.settlements)
            add_usage(connection, batch.usage)

    def _drop(self, usage: Usage | None) -> None:
        """Say that an entry is lost. The lease that it would have settled runs out, and stays as it was reserved."""
        self._metrics.count_store_failure()
        whose = {"tenant": usage.tenant, "model": usage.model} if usage is not None else {}
        log_event(log, "usage was lost: nobody can have used so much", level=logging.ERROR, **whose)

    async def _keep(self, batch: _Batch, error: StoreUnavailable) -> None:
        """Put a batch back for later, as few entries as it has tenants, models and days."""
        if not self._is_failing:
            log_event(log, f"usage is kept in memory for now: {error}", level=logging.ERROR)
        self._is_failing = True
        self._metrics.count_store_failure()
        self._next.usage = merge_usage([*batch.usage, *self._next.usage])
        self._next.settlements = batch.settlements + self._next.settlements
        batch.release()
        self._next.release()
        await asyncio.sleep(_RETRY_SECONDS)


def _is_possible(entry: Usage | Spent | None) -> bool:
    counts = msgspec.structs.astuple(entry) if entry is not None else ()
    return all(-_MAX_COUNT < count < _MAX_COUNT for count in counts if isinstance(count, int))
