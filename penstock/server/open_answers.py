"""The books of answers being made: what ends them early, and whether the server still takes work.

A caller who goes away ends their answer at once; a drain that runs out of time ends them all with an error. Knows
nothing of what an answer holds.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from penstock.errors import PenstockError

Receive = Callable[[], Awaitable[Any]]


class ClientGone(Exception):
    """The caller closed the connection: there is nobody left to answer."""


class Abortable(Protocol):
    def abort(self) -> None: ...


class OpenAnswers:
    def __init__(self) -> None:
        self.draining = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended_by: PenstockError | None = None

    def __len__(self) -> int:
        return len(self._tasks)

    async def attend(self, answer: Abortable, work: Coroutine[Any, Any, None], receive: Receive) -> None:
        """Run `work`, which delivers `answer`, unless the caller goes away first.

        Whatever happens, the engine is told to stop before this returns. Raises ClientGone, what `work` raises, or
        the error given to `end_all`.
        """
        task = asyncio.create_task(work)
        watcher = asyncio.create_task(_until_disconnect(receive))
        self._tasks.add(task)
        try:
            await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                answer.abort()
                raise ClientGone
            if task.cancelled() and self._ended_by is not None:
                raise self._ended_by
            task.result()
        finally:
            answer.abort()
            self._tasks.discard(task)
            task.cancel()
            watcher.cancel()
            await asyncio.gather(task, watcher, return_exceptions=True)

    def end_all(self, error: PenstockError) -> None:
        """End every open answer with this error."""
        self._ended_by = error
        for task in self._tasks:
            task.cancel()


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
