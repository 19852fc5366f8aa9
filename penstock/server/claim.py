"""Who waits for something that requests share before the engine has them, and until when.

Knows nothing of what is waited for.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from penstock.errors import DeadlineExceeded, Overloaded
from penstock.request import Tier
from penstock.server.terms import Terms
from penstock.telemetry import RequestRecord
from penstock.tenants import Caller

Result = TypeVar("Result")

_UNKNOWN_WAIT_SECONDS = 1.0
# Nobody gives up sooner: of terms that are too short even for an idle server the engine tells which would do.
_LEAST_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Claim:
    """Moments are of `time.monotonic`; None: it waits as long as it takes."""

    tenant: str
    tier: Tier = Tier.ONLINE
    deadline: float | None = None  # behind it the answer is of no use
    first_token_due: float | None = None  # behind it a target is missed that was asked for

    async def wait(self, work: "asyncio.Future[Result]", *, retry_seconds: float = _UNKNOWN_WAIT_SECONDS) -> Result:
        """Return the work's result. Raises DeadlineExceeded or Overloaded when the claim's time is over.

        The work itself goes on then, as it does for a caller who is cancelled: whoever gave it sees to its end.
        """
        moments = [moment for moment in (self.deadline, self.first_token_due) if moment is not None]
        left = max(0.0, min(moments) - time.monotonic()) if moments else None
        try:
            done, _ = await asyncio.wait((work,), timeout=left)
        finally:
            if not work.done():
                work.add_done_callback(_forget_failure)
        return work.result() if done else self._give_up(retry_seconds)

    def check(self, *, retry_seconds: float = _UNKNOWN_WAIT_SECONDS) -> None:
        """Raise as `wait` does when the claim's time is over already: nothing more need be begun for it."""
        now = time.monotonic()
        if any(moment is not None and now >= moment for moment in (self.deadline, self.first_token_due)):
            self._give_up(retry_seconds)

    def _give_up(self, retry_seconds: float) -> NoReturn:
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise DeadlineExceeded("deadline_ms passed before the request could be given to the engine")
        raise Overloaded(
            "the time to the first token that was asked for passed before the request could be given to the engine",
            retry_after_seconds=retry_seconds,
        )


def claim_of(caller: Caller, record: RequestRecord, terms: Terms) -> Claim:
    """Return what a request may wait for. One of best effort waits for its first token as long as it takes."""
    ttft = None if terms.best_effort else terms.targets.ttft_seconds
    return Claim(
        tenant=caller.tenant,
        tier=terms.tier,
        deadline=_moment(record, terms.deadline_seconds),
        first_token_due=_moment(record, ttft),
    )


def _moment(record: RequestRecord, seconds: float | None) -> float | None:
    return None if seconds is None else record.arrival + max(seconds, _LEAST_SECONDS)


def _forget_failure(work: "asyncio.Future[Result]") -> None:
    if not work.cancelled():
        work.exception()  # nobody is left to be told
