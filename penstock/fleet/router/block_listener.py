"""Listens to replicas that tell which blocks they have cached, and keeps what they told.

A replica that cannot be heard, or of which something was missed, is known only by what it was sent; it is asked again
after a while. Knows nothing of how the blocks are used.
"""

import asyncio
import functools
import logging

import aiohttp

from penstock.fleet.cached_blocks import BlocksMissed, CachedBlocks
from penstock.fleet.replica import Replica, ReplicaPool
from penstock.fleet.router.upstream import UPSTREAM_ERRORS, own_headers, target
from penstock.fleet.supervision import keep_running
from penstock.protocol.block_events import BlockChanges, BlockSnapshot, BrokenMessages, MessageReader
from penstock.telemetry import log_event

_LOOK_SECONDS = 0.5
_FIRST_RETRY_SECONDS = 0.5
_MAX_RETRY_SECONDS = 30.0
_SILENCE_SECONDS = 20.0  # a replica says every few seconds that it is there

log = logging.getLogger("penstock.gateway")


class BlockListener:
    """One stream for each replica that is up."""

    def __init__(self, pool: ReplicaPool, session: aiohttp.ClientSession) -> None:
        self._pool = pool
        self._session = session
        self._tasks: dict[Replica, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Follow whoever can be followed, for ever."""
        try:
            while True:
                self._look()
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            self._tasks.clear()

    def _look(self) -> None:
        wanted = {replica for replica in self._pool if replica.adapter.block_events_path and replica.is_up}
        for replica in [item for item in self._tasks if item not in wanted]:
            self._tasks.pop(replica).cancel()
        for replica in wanted - self._tasks.keys():
            follow = functools.partial(self._follow, replica)
            self._tasks[replica] = asyncio.create_task(keep_running(f"the block events of {replica.name}", follow))

    async def _follow(self, replica: Replica) -> None:
        """Listen again and again; longer pauses where nothing came of it."""
        pause = _FIRST_RETRY_SECONDS
        while True:
            try:
                await self._listen(replica)
                why = "it ended the stream"
            except UPSTREAM_ERRORS:
                why = "it cannot be heard"
            except (BlocksMissed, BrokenMessages) as error:
                why = str(error)
            finally:
                was_heard, replica.blocks = replica.blocks is not None, None
            log_event(log, "a replica's block events ended", replica=replica.name, reason=why)
            pause = _FIRST_RETRY_SECONDS if was_heard else min(2 * pause, _MAX_RETRY_SECONDS)
            await asyncio.sleep(pause)

    async def _listen(self, replica: Replica) -> None:
        path = replica.adapter.block_events_path
        assert path is not None
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._pool.health.connect_seconds, sock_read=_SILENCE_SECONDS
        )
        url, headers = target(replica, path), own_headers(replica)
        async with self._session.get(url, headers=headers, timeout=timeout, allow_redirects=False) as response:
            if response.status != 200:
                raise BrokenMessages(f"it answered {response.status}")
            reader = MessageReader()
            while data := await response.content.readany():
                for message in reader.feed(data):
                    if isinstance(message, BlockSnapshot):
                        replica.blocks = CachedBlocks(message)
                    elif isinstance(message, BlockChanges) and replica.blocks is not None:
                        replica.blocks.apply(message)
