"""The engine's end of block events: who listens, what each must be told first, and the number of every change.

Nothing is noted while nobody listens. Knows the cache's names; nothing of sockets or gateways.
"""

from penstock.block_hash import short_name
from penstock.engine.cache.block_log import BlockLog, Whereabouts
from penstock.engine.cache.kv_cache import KvCache
from penstock.protocol.block_events import BlockChanges, BlockSnapshot, pack


class BlockFeed:
    def __init__(self, cache: KvCache) -> None:
        self.listeners: set[bytes] = set()
        self._cache = cache
        self._number = 0

    def join(self, listener: bytes) -> tuple[BlockChanges | None, BlockSnapshot]:
        """Begin to tell a listener, or tell it all again; also return what those who listen already must get first."""
        changes = self.take()
        self.listeners.add(listener)
        if self._cache.block_log is None:
            self._cache.block_log = BlockLog()
        names = pack(map(short_name, self._cache.names()))
        on_host = pack(map(short_name, self._cache.names_on_host()))
        return changes, BlockSnapshot(self._number, self._cache.block_tokens, names, on_host)

    def leave(self, listener: bytes) -> None:
        self.listeners.discard(listener)
        if not self.listeners:
            self._cache.block_log = None

    def take(self) -> BlockChanges | None:
        """Return what has changed since the last call, if anything has."""
        log = self._cache.block_log
        if log is None or log.is_empty:
            return None
        self._number += 1
        self._cache.block_log = BlockLog()
        return BlockChanges(
            self._number,
            stored=pack(map(short_name, log.names(Whereabouts.DEVICE))),
            removed=pack(map(short_name, log.names(Whereabouts.NOWHERE))),
            cleared=log.has_cleared,
            to_host=pack(map(short_name, log.names(Whereabouts.HOST))),
        )
