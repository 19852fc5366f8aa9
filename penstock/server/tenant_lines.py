"""Lines of tenants before something that serves one request at a time, which they take turns at fairly.

Each tenant's requests wait in a line of their own. What a turn takes is counted in sizes, and the tenant that would
have had least behind its next turn goes first: a flood of one tenant costs another the turn under way, and a small
request goes before another tenant's large one, but not for ever. Batch work goes when nobody else waits. Knows nothing
of what is done in a turn.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.errors import Overloaded
from penstock.request import Tier
from penstock.server.claim import Claim

Result = TypeVar("Result")
Owner = tuple[bool, str]  # whether it is batch work, and the tenant

MAX_WAITING = 1024
MAX_WAITING_SIZE = 64 * 1024**2

_TURN_SIZE = 512  # what a turn costs however little is done in it
_LEARNING_RATE = 0.1
_LEAST_WAIT_SECONDS = 0.1


@dataclass(slots=True)
class _Line:
    """What waits of one tenant. `level` is how much its tenant has had when its first begins."""

    level: float
    waiting: "deque[tuple[asyncio.Future[None], int]]" = field(default_factory=deque)
    size: int = 0

    @property
    def next_level(self) -> float:
        return self.level + self.waiting[0][1]


class TenantLines:
    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._is_taken = False
        self._lines: dict[Owner, _Line] = {}
        self._levels: dict[Owner, float] = {}  # of those who had turns since it was last idle
        self._level = 0.0  # of the turn under way
        self._seconds_per_size = 0.0

    async def run(self, claim: Claim, size: int, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Do the work when it is the claim's turn. Raises as the work does, Overloaded or DeadlineExceeded.

        A claim whose time is over leaves its line at once. Work that has begun is not interrupted for it: it keeps its
        turn to its end.
        """
        claim.check(retry_seconds=self._wait_seconds())
        size += _TURN_SIZE
        await self._wait(claim, size)
        began = self._clock()
        task = asyncio.create_task(work())
        task.add_done_callback(lambda _: self._end_turn(size, self._clock() - began))
        return await claim.wait(task, retry_seconds=self._wait_seconds())

    async def _wait(self, claim: Claim, size: int) -> None:
        owner = (claim.tier is Tier.BATCH, claim.tenant)
        level = max(self._level, self._levels.get(owner, 0.0))
        if not self._is_taken:
            self._begin_turn(owner, level + size)
            return
        line = self._lines.setdefault(owner, _Line(level))
        if len(line.waiting) >= MAX_WAITING or (line.size and line.size + size > MAX_WAITING_SIZE):
            raise Overloaded(
                "too many of your requests wait to be read, or for their prompts to be made",
                retry_after_seconds=self._wait_seconds(),
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (turn, size)
        line.waiting.append(place)
        line.size += size
        try:
            await claim.wait(turn, retry_seconds=self._wait_seconds())
        except BaseException:
            if turn.done():
                self._next_turn()  # it came in the moment in which nobody wanted it any more
            else:
                self._leave(owner, line, place)
            raise

    def _leave(self, owner: Owner, line: _Line, place: "tuple[asyncio.Future[None], int]") -> None:
        line.waiting.remove(place)
        line.size -= place[1]
        if not line.waiting:
            del self._lines[owner]

    def _begin_turn(self, owner: Owner, level: float) -> None:
        self._is_taken = True
        self._level = self._levels[owner] = level

    def _end_turn(self, size: int, seconds: float) -> None:
        self._seconds_per_size += _LEARNING_RATE * (seconds / size - self._seconds_per_size)
        self._next_turn()

    def _next_turn(self) -> None:
        if not self._lines:
            self._is_taken, self._level = False, 0.0
            self._levels.clear()
            return
        owner = min(self._lines, key=lambda owner: (owner[0], self._lines[owner].next_level))
        line = self._lines[owner]
        line.level, place = line.next_level, line.waiting[0]
        self._leave(owner, line, place)
        self._begin_turn(owner, line.level)
        place[0].set_result(None)

    def _wait_seconds(self) -> float:
        """About when all that waits now will have had its turn."""
        return max(_LEAST_WAIT_SECONDS, sum(line.size for line in self._lines.values()) * self._seconds_per_size)
