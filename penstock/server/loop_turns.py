"""Turns at an API worker's event loop: of the long work that waits, a bounded part in each pass of the loop.

Between two passes everything else that is ready runs, so nobody waits for long. Knows nothing of what is done in a
turn: whoever takes one says how much it is, does no more, and asks again.
"""

import asyncio
from collections import deque

# In one pass, in tokens and log-probabilities made into text and JSON: some milliseconds.
ENTRIES_A_PASS = 512


class LoopTurns:
    """One for each event loop. First come, first served: many long answers share, none starves."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._num_left = ENTRIES_A_PASS  # of this pass
        self._is_counting = False  # whether a pass has begun that must end

    async def take(self, num_entries: int) -> None:
        """Return when there is room for so many entries, at most ENTRIES_A_PASS, in this pass of the loop."""
        loop = asyncio.get_running_loop()
        if not self._is_counting:
            self._is_counting = True
            loop.call_soon(self._begin_pass)
        if not self._waiting and num_entries <= self._num_left:
            self._num_left -= num_entries
            return
        turn = loop.create_future()
        self._waiting.append((turn, num_entries))
        await turn

    def _begin_pass(self) -> None:
        self._num_left = ENTRIES_A_PASS
        self._is_counting = bool(self._waiting)
        while self._waiting and self._waiting[0][1] <= self._num_left:
            turn, num_entries = self._waiting.popleft()
            if not turn.done():  # else its task was cancelled
                self._num_left -= num_entries
                turn.set_result(None)
        if self._is_counting:
            # Behind the tasks that were just woken: the next ones come a pass later.
            asyncio.get_running_loop().call_soon(self._begin_pass)
