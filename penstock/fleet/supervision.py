"""Work in the background that somebody watches: what it trips over is logged, and it is begun again.

Knows nothing of what the work is.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

PAUSE_SECONDS = 2.0  # before work that failed is begun again

log = logging.getLogger("penstock.gateway")


async def attempt(name: str, work: Coroutine[Any, Any, None]) -> bool:
    """Do it, and return whether it came to its end; what it raised is logged. Who cancels this cancels the work."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait((task,))
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    failure = None if task.cancelled() else task.exception()
    if failure is None and not task.cancelled():
        return True
    log.error("%s failed", name, exc_info=failure)
    return False


async def keep_running(name: str, begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do what `begin` gives; begin it again, after a pause, as often as it fails."""
    while True:
        if await attempt(name, begin()):
            return
        await asyncio.sleep(PAUSE_SECONDS)
