"""A server that says nothing for long, told to whoever waits for it.

Looks at the client's open requests, and at nothing of the answers but when the last of them said something.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from penstock.tools.bench.client import SILENCE_SECONDS, StreamClient

REMARK_SECONDS = 10.0  # of silence before the first remark, and between two


@asynccontextmanager
async def silence_told(
    client: StreamClient, tell: Callable[[str], None], *, now: Callable[[], float] = time.perf_counter
) -> AsyncIterator[None]:
    """Tell, for as long as it is entered, that the server has been silent while requests are open."""
    task = asyncio.create_task(_tell_silence(client, tell, now))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _tell_silence(client: StreamClient, tell: Callable[[str], None], now: Callable[[], float]) -> None:
    told = now()
    while True:
        since = max(told, client.last_heard) if client.num_open else now()
        due = since + REMARK_SECONDS - now()
        if due > 0:
            await asyncio.sleep(due)
            continue
        told = now()
        requests = "a request is" if client.num_open == 1 else f"{client.num_open} requests are"
        tell(
            f"{client.url} has said nothing for {told - client.last_heard:.0f} s, while {requests} open; "
            f"each is given up after {SILENCE_SECONDS:.0f} s. Ctrl-C ends the load and reports what is there."
        )
