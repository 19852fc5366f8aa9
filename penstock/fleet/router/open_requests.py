"""The requests that a gateway is answering: when it drains they may finish, and what takes too long is told to end.

Knows nothing of HTTP.
"""

import asyncio
from typing import Any


class OpenRequests:
    """Each is a task of its own, and counts while it is within this as a context."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.is_over = False  # the drain is: whoever is cancelled now is so by us, and not because its caller left

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)

    def __exit__(self, *_: object) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.discard(task)

    async def drain(self, seconds: float, last_seconds: float) -> None:
        """Wait until there is none, for so long; then cancel the rest, who have a moment for their last words."""
        clock = asyncio.get_running_loop().time
        ends = clock() + seconds
        while self._tasks and (left := ends - clock()) > 0:
            await asyncio.wait(self._tasks, timeout=left)
        self.is_over = True
        rest = set(self._tasks)
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=last_seconds)
