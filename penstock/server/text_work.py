"""Work on long texts, in threads, so that no caller's book holds up everyone's streams.

Two threads: one for texts of ordinary length and one for larger ones, so that a short text never waits for a long one.
In each of them tenants take turns. Knows nothing of tokens or HTTP.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock.server.claim import Claim
from penstock.server.tenant_lines import TenantLines

Result = TypeVar("Result")

LARGE_CHARACTERS = 32 * 1024


class TextWork:
    def __init__(self) -> None:
        self._ordinary, self._large = TenantLines(), TenantLines()
        self._threads = ThreadPoolExecutor(2, "penstock-text")

    async def run(self, claim: Claim, num_characters: int, work: Callable[[], Result]) -> Result:
        """Return what `work` returns, done in a thread in the claim's turn. Raises as `TenantLines.run` does."""

        async def in_thread() -> Result:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)

        lines = self._large if num_characters > LARGE_CHARACTERS else self._ordinary
        return await lines.run(claim, num_characters, in_thread)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
