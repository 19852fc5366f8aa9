"""Keeps a key ring as its source says while the server runs: a revoked key stops working within seconds.

Looks at a number that changes with the source, and reads the keys only when it did. Knows nothing of requests.
"""

import asyncio
import logging
import os
from concurrent.futures import Executor
from typing import Protocol

from penstock.errors import ConfigError, StoreUnavailable
from penstock.store.key_ring import KeyRing, read_keys
from penstock.telemetry import log_event
from penstock.tenants import ApiKey

WATCH_SECONDS = 1.0

log = logging.getLogger("penstock.keys")


class KeySource(Protocol):
    """Where keys come from. Raises ConfigError or StoreUnavailable when it cannot be read."""

    def version(self) -> object: ...
    def load(self) -> tuple[ApiKey, ...]: ...
    def had_any(self) -> bool: ...


class KeyFile:
    """A TOML file of keys. One without any revokes them all; one that is gone says nothing."""

    def __init__(self, path: str) -> None:
        self._path = path

    def version(self) -> object:
        try:
            found = os.stat(self._path)
        except OSError as error:
            raise ConfigError("--keys", self._path, f"it cannot be read ({error.strerror})") from error
        return found.st_mtime_ns, found.st_size, found.st_ino

    def load(self) -> tuple[ApiKey, ...]:
        return read_keys(self._path)

    def had_any(self) -> bool:
        return True  # a server is not started on a file without keys


class KeyWatcher:
    """Reads in `thread`; None: among what else the event loop has threads do."""

    def __init__(self, ring: KeyRing, source: KeySource, *, needs_keys: bool, thread: Executor | None = None) -> None:
        self._ring = ring
        self._source = source
        self._thread = thread
        self._needs_keys = needs_keys
        self._version: object = None
        self._told: str | None = None  # what was logged last of a source that still cannot be read

    async def run(self) -> None:
        """Look again and again."""
        while True:
            await self.look()
            await asyncio.sleep(WATCH_SECONDS)

    async def look(self) -> None:
        """Take the keys over if they changed. What cannot be read leaves them as they were."""
        try:
            changed = await asyncio.get_running_loop().run_in_executor(self._thread, self._read)
        except (ConfigError, StoreUnavailable) as error:
            # Once for each mistake: behind one that was mended the next comes to light.
            if str(error) != self._told:
                log_event(log, f"keys stay as they were: {error}", level=logging.ERROR)
            self._told = str(error)
            return
        self._told = None
        if changed is not None:
            keys, had_any = changed
            self._ring.replace(keys, needs_keys=self._needs_keys or had_any)

    def _read(self) -> tuple[tuple[ApiKey, ...], bool] | None:
        version = self._source.version()
        if version == self._version:
            return None
        # Keys that change between these reads change the version too, and are read the next time. The keys come last: a
        # first key that is made meanwhile must not close the server to its own caller.
        had_any = self._source.had_any()
        keys = self._source.load()
        self._version = version
        return keys, had_any
