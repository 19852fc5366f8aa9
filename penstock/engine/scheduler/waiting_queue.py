"""Requests that hold no row, best first: tier, priority, then the tenant that got least, then the most urgent.

Whoever waits rises by one priority for each `AGEING_SECONDS`, so that no stream of better requests can keep it waiting
for ever; of one tenant one at a time, or a flood would pass the new requests of all others once it is old enough, and
beside other tenants none while others of its own start at its level: those are what it waits for. The batch tier does
not rise, since it is there to wait. Bounded by the scheduler.
"""

import heapq
import math
from collections.abc import Iterator

from penstock.engine.scheduler.request_state import LevelKey, RequestState, TenantAccount
from penstock.engine.scheduler.tenant_account import Level, wanted_tokens
from penstock.request import MAX_PRIORITY

AGEING_SECONDS = 10.0
# The next request of the same tenant rises to the same level so much later at the earliest.
RISE_INTERVAL_SECONDS = 5.0


class WaitingQueue:
    """Every operation is logarithmic in the number of tenants and requests, beside moving a list's tail."""

    def __init__(self, quantum: float) -> None:
        self.quantum = quantum
        self._levels: dict[LevelKey, Level] = {}
        self._order: list[Level] = []  # best first
        self._members: dict[int, RequestState] = {}
        self._num_of_tier: dict[int, int] = {}
        self._risers: list[tuple[float, int]] = []  # when a waiting request may rise next
        self._shared_until = -math.inf  # somebody came beside another tenant within the last `AGEING_SECONDS`
        self._next_rises: dict[tuple[str, LevelKey], float] = {}  # when a tenant's next may rise from a level

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._members.values())

    @property
    def levels(self) -> list[Level]:
        return self._order

    def find(self, number: int) -> RequestState | None:
        """The request of this number, if it waits."""
        return self._members.get(number)

    def num_of_tier(self, tier: int) -> int:
        return self._num_of_tier.get(tier, 0)

    def num_of_tenant(self, tenant: str, tier: int) -> int:
        accounts = [level.accounts.get(tenant) for level in self._order if level.key[0] == tier]
        return sum([len(account.waiting) for account in accounts if account is not None])

    def open_account(self, level: LevelKey, tenant: str, weight: float, num_prompt_tokens: int) -> TenantAccount:
        """Return the account that a request of the tenant counts for; `dismiss` the request at its end."""
        at = self._level(level)
        account = at.account(tenant, weight)
        at.change_demand(account, 1, wanted_tokens(num_prompt_tokens))
        return account

    def dismiss(self, request: RequestState) -> None:
        """Take an ended request off its account."""
        level = self._levels[request.level]
        level.change_demand(request.account, -1, -wanted_tokens(request.num_prompt_tokens))
        level.close(request.account)

    def push(self, request: RequestState, now: float) -> None:
        self._members[request.number] = request
        self._num_of_tier[request.level[0]] = self.num_of_tier(request.level[0]) + 1
        level = self._levels[request.level]
        level.push(request)
        if level.num_tenants > 1:
            self._shared_until = now + AGEING_SECONDS
        if _can_rise(request):
            heapq.heappush(self._risers, (now + AGEING_SECONDS, request.number))

    def best(self) -> RequestState | None:
        """The request to start next."""
        for level in self._order:
            best = level.best()
            if best is not None:
                return best
        return None

    def remove(self, request: RequestState) -> None:
        del self._members[request.number]
        self._num_of_tier[request.level[0]] -= 1
        self._levels[request.level].remove(request)
        if len(self._risers) > 2 * len(self._members) + 16:
            # Drop the ghosts of those that left once they outnumber the members.
            self._risers = [entry for entry in self._risers if entry[1] in self._members]
            heapq.heapify(self._risers)

    def change_rows(self, request: RequestState, change: int) -> None:
        """The request got or left a row."""
        request.account.num_rows += change

    def least_counters(self) -> dict[LevelKey, float]:
        """The counter of the tenant that got least, at each level where somebody waits."""
        return {level.key: level.least() for level in self._order if level.best() is not None}

    def least_counter(self, level: LevelKey) -> float:
        """The counter with which a tenant comes to this level that has not been there."""
        return self._level(level).least()

    def age(self, now: float) -> None:
        """Let those rise that have waited long enough."""
        while self._risers and self._risers[0][0] <= now:
            request = self._members.get(heapq.heappop(self._risers)[1])
            if request is None or not _can_rise(request):
                continue
            if (later := self._take_turn(request, now)) is not None:
                heapq.heappush(self._risers, (later, request.number))
                continue
            weight = request.account.weight
            self.remove(request)
            self.dismiss(request)
            request.level = (request.level[0], request.level[1] - 1)
            request.num_rises += 1
            request.account = self.open_account(request.level, request.tenant, weight, request.num_prompt_tokens)
            self.push(request, now)

    def _take_turn(self, request: RequestState, now: float) -> float | None:
        """Take the tenant's turn to rise; return when there is one again where another request has just had it.

        While requests of the tenant start at this level, the others wait for its own, and none of them rises, unless
        there is no other tenant that it could pass.
        """
        may_rise_at = min(request.account.last_start + AGEING_SECONDS, self._shared_until)
        if now < may_rise_at:
            return may_rise_at
        place = (request.tenant, request.level)
        later = self._next_rises.get(place, now)
        if later > now:
            return later
        self._next_rises = {key: moment for key, moment in self._next_rises.items() if moment > now}
        self._next_rises[place] = now + RISE_INTERVAL_SECONDS
        return None

    def _level(self, key: LevelKey) -> Level:
        level = self._levels.get(key)
        if level is None:
            level = self._levels[key] = Level(key, self.quantum)
            self._order = sorted(self._levels.values(), key=_level_key)
        return level


def _can_rise(request: RequestState) -> bool:
    tier, rank = request.level
    return tier == 0 and rank > -MAX_PRIORITY


def _level_key(level: Level) -> LevelKey:
    return level.key
