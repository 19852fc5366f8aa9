"""Who came lately, and so how much will come of those who would pass a request that waits.

A forecast knows who is there. Whoever comes later and asks for less for its weight, or is of a better level, goes first
all the same. Looks at requests; changes nothing but its own sums.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from penstock.engine.scheduler.load import Claim
from penstock.engine.scheduler.request_state import LevelKey, RequestState

# As far back as is looked, and the least time that a tenant that has just come is taken to have come for.
_WINDOW_SECONDS = 4.0
_LEAST_SECONDS = 0.5


@dataclass(slots=True)
class _Stream:
    """What came of one tenant at one level."""

    began: float
    num_requests: int = 0
    prompt_tokens: int = 0
    demand: float = 0.0  # of the tenant when each came, added up

    def add(self, sign: int, prompt_tokens: int, demand: float) -> None:
        self.num_requests += sign
        self.prompt_tokens += sign * prompt_tokens
        self.demand += sign * demand

    def rate(self, now: float) -> float:
        """Prompt tokens a second."""
        return self.prompt_tokens / min(_WINDOW_SECONDS, max(_LEAST_SECONDS, now - self.began))


class Comers:
    """Requests that were taken in, of the last seconds, added up."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._comers: deque[tuple[float, tuple[str, LevelKey], int, float]] = deque()
        self._streams: dict[tuple[str, LevelKey], _Stream] = {}

    def note(self, request: RequestState) -> None:
        """A request was taken in."""
        self._forget_old()
        now, key = self._clock(), (request.tenant, request.level)
        counts = (request.num_prompt_tokens, request.account.demand)
        self._comers.append((now, key, *counts))
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = _Stream(now)
        stream.add(1, *counts)

    def passing_rate(self, claim: Claim) -> float:
        """Prompt tokens a second of those who would pass a request that comes now."""
        self._forget_old()
        now, request = self._clock(), claim.request
        rate = 0.0
        for (tenant, level), stream in self._streams.items():
            is_modest = tenant != request.tenant and stream.demand < claim.demand * stream.num_requests
            if level < request.level or (level == request.level and is_modest):
                rate += stream.rate(now)
        return rate

    def rate(self) -> float:
        """Prompt tokens a second of all that are no batch."""
        self._forget_old()
        now = self._clock()
        return sum([stream.rate(now) for (_, (tier, _)), stream in self._streams.items() if tier == 0])

    def _forget_old(self) -> None:
        oldest = self._clock() - _WINDOW_SECONDS
        while self._comers and self._comers[0][0] < oldest:
            _, key, prompt_tokens, demand = self._comers.popleft()
            stream = self._streams[key]
            stream.add(-1, prompt_tokens, demand)
            if not stream.num_requests:
                del self._streams[key]
