"""Who came lately, and so how much will come of those who would pass a request that waits.

A forecast knows who is there. Whoever comes later and asks for less for its weight, or is of a better level, goes first
all the same. Looks at requests; changes nothing but its own sums.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.engine.scheduler.load import Claim
from penstock.engine.scheduler.request_state import LevelKey, RequestState, TenantAccount
from penstock.engine.scheduler.tenant_account import wanted_tokens

# As far back as is looked, and the least time that a tenant that has just come is taken to have come for.
_WINDOW_SECONDS = 4.0
_LEAST_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _Call:
    """What came at once: a request, or several answers that one stands for."""

    at: float
    stream: tuple[str, LevelKey]
    prompt_tokens: int  # to run until the first tokens of all its answers
    wanted_tokens: int


@dataclass(slots=True)
class _Stream:
    """What came of one tenant at one level."""

    began: float
    account: TenantAccount
    num_calls: int = 0
    prompt_tokens: int = 0
    wanted_tokens: int = 0
    last_at: float = -math.inf

    def add(self, sign: int, call: _Call) -> None:
        self.num_calls += sign
        self.prompt_tokens += sign * call.prompt_tokens
        self.wanted_tokens += sign * call.wanted_tokens

    @property
    def next_demand(self) -> float:
        """What the tenant will ask for, over its weight, when its next call has come."""
        return self.account.demand + self.wanted_tokens / self.num_calls / self.account.weight

    def rate(self, now: float) -> float:
        """Prompt tokens a second."""
        return self.prompt_tokens / min(_WINDOW_SECONDS, max(_LEAST_SECONDS, now - self.began))


@dataclass(slots=True)
class Passing:
    """Some who would pass a request."""

    rate: float = 0.0  # prompt tokens a second
    prompt_tokens: float = 0.0  # of one call of theirs, the longest on the mean
    most_tokens: float = 0.0  # before they have got so much more that it is their turn no longer
    last_at: float = -math.inf  # when one of them last came

    def add(self, stream: _Stream, most_tokens: float, now: float) -> None:
        self.rate += stream.rate(now)
        self.prompt_tokens = max(self.prompt_tokens, stream.prompt_tokens / stream.num_calls)
        self.most_tokens += most_tokens
        self.last_at = max(self.last_at, stream.last_at)

    @property
    def forgotten_at(self) -> float:
        """When they no longer count, if none of them comes until then."""
        return self.last_at + _WINDOW_SECONDS


@dataclass(frozen=True, slots=True)
class Passers:
    """Those who would pass a request."""

    anyone: Passing = field(default_factory=Passing)
    above: Passing = field(default_factory=Passing)  # those of a better level


class Comers:
    """Requests that were taken in, of the last seconds, added up."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._calls: deque[_Call] = deque()
        self._streams: dict[tuple[str, LevelKey], _Stream] = {}
        self._asked: RequestState | None = None
        self._passers = Passers()

    def note(self, request: RequestState) -> None:
        """A request was taken in."""
        if request.follows is not None:  # another stands for it
            return
        self._forget_old()
        now, key = self._clock(), (request.tenant, request.level)
        wanted = request.call_answers * wanted_tokens(request.num_prompt_tokens)
        call = _Call(now, key, request.work.tokens, wanted)
        self._calls.append(call)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = _Stream(now, request.account)
        stream.account, stream.last_at = request.account, now
        stream.add(1, call)
        self._asked = None

    def passers(self, claim: Claim, quantum: float) -> Passers:
        """Those who would pass a request that comes now, until they lead its tenant by `quantum`."""
        # A forecast looks at one request many times, at one moment.
        if self._asked is not claim.request:
            self._asked, self._passers = claim.request, self._find_passers(claim, quantum)
        return self._passers

    def rate(self) -> float:
        """Prompt tokens a second of all that are no batch."""
        self._forget_old()
        now = self._clock()
        return sum([stream.rate(now) for (_, (tier, _)), stream in self._streams.items() if tier == 0])

    def _find_passers(self, claim: Claim, quantum: float) -> Passers:
        self._forget_old()
        now, request = self._clock(), claim.request
        passers = Passers()
        for (tenant, level), stream in self._streams.items():
            is_modest = level == request.level and tenant != request.tenant and stream.next_demand < claim.demand
            if level < request.level:
                passers.above.add(stream, math.inf, now)
            if level < request.level or is_modest:
                passers.anyone.add(stream, quantum if is_modest else math.inf, now)
        return passers

    def _forget_old(self) -> None:
        oldest = self._clock() - _WINDOW_SECONDS
        while self._calls and self._calls[0].at < oldest:
            call = self._calls.popleft()
            stream = self._streams[call.stream]
            stream.add(-1, call)
            if not stream.num_calls:
                del self._streams[call.stream]
