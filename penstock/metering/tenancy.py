"""What one process needs of tenants, an API worker or a gateway: their keys, limits and books, over one store.

Opened before it serves and closed behind its last request. Knows nothing of HTTP or the engine.
"""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from penstock.errors import StoreUnavailable
from penstock.metering.books import Books
from penstock.metering.counts import StoreMetrics
from penstock.metering.meter import Meter
from penstock.metering.store_thread import StoreThread
from penstock.store.database import Database
from penstock.store.key_ring import KeyRing
from penstock.store.key_watch import KeyFile, KeySource, KeyWatcher
from penstock.store.keys import KeyStore
from penstock.store.quotas import QuotaStore
from penstock.telemetry import log_event
from penstock.tenants import ApiKey

log = logging.getLogger("penstock.tenancy")


class KeySettings(Protocol):
    """Where keys come from, as the configuration says."""

    @property
    def keys(self) -> tuple[ApiKey, ...]: ...
    @property
    def keys_file(self) -> str | None: ...
    @property
    def needs_keys(self) -> bool: ...


class Tenancy:
    """Make it, `start` it in an event loop, and `close` it there."""

    def __init__(self, settings: KeySettings, metrics: StoreMetrics, database: Database | None = None) -> None:
        self.database = database
        self.ring = KeyRing(settings.keys, needs_keys=settings.needs_keys)
        self._metrics = metrics
        # One thread: SQLite lets one write at a time anyway, and waiting for it here costs nobody anything.
        self._thread = StoreThread("store")
        self._books = Books(database, self._thread, metrics) if database is not None else None
        self._look_thread = StoreThread("store-looks")
        quotas = QuotaStore(database) if database is not None else None
        self.meter = Meter(
            metrics, thread=self._thread, look_thread=self._look_thread, quotas=quotas, books=self._books
        )
        self._source = _key_source(settings, database)
        # No tenant's work waits here, so that a key is revoked in time whatever tenants do.
        self.key_thread = ThreadPoolExecutor(1, "penstock-keys")
        self._needs_keys = settings.needs_keys
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def stored_keys(self) -> KeyStore | None:
        """The store's keys, where those are the server's keys."""
        return self._source if isinstance(self._source, KeyStore) else None

    @property
    def store_identity(self) -> str | None:
        """The store's, by which two servers tell whether they share it."""
        return self.database.identity if self.database is not None else None

    @property
    def fleet_secret(self) -> str | None:
        """The store's, by which servers and gateways that share it know each other."""
        return self.database.fleet_secret if self.database is not None else None

    def start(self) -> None:
        """Begin to follow the keys and to keep leases."""
        if self._source is not None:
            watcher = KeyWatcher(self.ring, self._source, needs_keys=self._needs_keys, thread=self.key_thread)
            self._tasks.append(asyncio.create_task(watcher.run()))
        self._tasks.append(asyncio.create_task(self._keep_leases()))

    async def close(self) -> None:
        """Write what is left and let go of the store."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._books is not None:
            await self._books.close()
        self._thread.shutdown()
        self._look_thread.shutdown()
        self.key_thread.shutdown()
        if self.database is not None:
            self.database.close()

    async def _keep_leases(self) -> None:
        while self.database is not None:
            try:
                await self.meter.keep_leases()
            except StoreUnavailable as error:
                self._metrics.count_store_failure()
                log_event(log, f"leases were not renewed: {error}", level=logging.ERROR)


def _key_source(settings: KeySettings, database: Database | None) -> KeySource | None:
    if settings.keys_file is not None:
        return KeyFile(settings.keys_file)
    return KeyStore(database) if database is not None else None
