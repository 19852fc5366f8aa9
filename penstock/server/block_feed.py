"""Block events on their way from the engine to whoever listens over HTTP.

Every listener gets a snapshot and then every change. One that falls too far behind is cut, and may come again for
another snapshot. Knows nothing of what is in the messages.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from penstock.engine.client import EngineClient
from penstock.protocol.block_events import BlockChanges, BlockSnapshot, KeepAlive, encode

MAX_WAITING_BYTES = 16 * 1024 * 1024
_LOOK_SECONDS = 1.0
_LOOKS_PER_SIGN = 5  # of life, while nothing changes


class _Listener:
    def __init__(self) -> None:
        self.waiting: deque[bytes] = deque()
        self.num_bytes = 0
        self.has_snapshot = False
        self.is_cut = False
        self.arrived = asyncio.Event()

    def push(self, message: bytes) -> None:
        self.num_bytes += len(message)
        self.waiting.append(message)
        self.arrived.set()

    def cut(self) -> None:
        self.is_cut = True
        self.arrived.set()

    def take(self) -> bytes:
        """Return everything that waits."""
        joined = b"".join(self.waiting)
        self.waiting.clear()
        self.num_bytes = 0
        self.arrived.clear()
        return joined


class BlockFeed:
    """All listeners of one API worker. They share one subscription to the engine."""

    def __init__(self, engine: EngineClient, *, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._engine = engine
        self._max_waiting_bytes = max_waiting_bytes
        self._listeners: set[_Listener] = set()
        self._is_closed = False
        engine.on_blocks = self._take

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """Yield messages for one listener until it is cut, the engine goes away or the feed closes."""
        listener = _Listener()
        self._listeners.add(listener)
        self._engine.watch_blocks()
        try:
            num_looks = 0
            while not (self._is_closed or listener.is_cut):
                if listener.waiting:
                    num_looks = 0
                    yield listener.take()
                    continue
                try:
                    async with asyncio.timeout(_LOOK_SECONDS):
                        await listener.arrived.wait()
                except TimeoutError:
                    num_looks += 1
                    if num_looks % _LOOKS_PER_SIGN == 0:
                        yield encode(KeepAlive())
        finally:
            self._listeners.discard(listener)
            if not self._listeners:
                self._engine.leave_blocks()

    def close(self) -> None:
        """End every listener's stream: the worker stops."""
        self._is_closed = True
        self._cut_all()

    def _take(self, message: BlockSnapshot | BlockChanges | None) -> None:
        """Hand a message of the engine on; None: it is gone, and so is what its cache held."""
        if message is None:
            self._cut_all()
            return
        is_snapshot = isinstance(message, BlockSnapshot)
        encoded = encode(message)
        for listener in self._listeners:
            # A snapshot is for those who have none; changes are for those who have one.
            if listener.has_snapshot == is_snapshot:
                continue
            listener.has_snapshot = True
            listener.push(encoded)
            if listener.num_bytes > self._max_waiting_bytes + len(encoded):
                listener.cut()

    def _cut_all(self) -> None:
        for listener in self._listeners:
            listener.cut()
