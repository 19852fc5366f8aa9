"""What each tenant has been given, so that the one with the least is served next.

A tenant's counter is the service it got divided by its weight: computed prompt tokens and drawn tokens, each at its
cost. Accounts of one `Level` (a tier and a priority) are weighed against each other, never against another level's.
Knows nothing of rows' contents, blocks or time.
"""

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from penstock.engine.scheduler.request_state import LevelKey, RequestState, TenantAccount

# What a token costs its tenant. Drawing one takes a step of its own and reads the whole context again: on an H200 with
# an 8B model and a full batch it takes about twice the time of a prompt token.
PROMPT_TOKEN_COST = 1.0
DRAWN_TOKEN_COST = 2.0


# Service by which a tenant may lead another before asking for less counts for nothing. A longest request costs at least
# twice as much.
MAX_QUANTUM = 32768.0
# The lead from which on a tenant gives rows up to another that waits and asks for less, also those that were promised a
# time per token.
ROW_QUANTUM = 8192.0

# What an answer counts for in what a tenant asks for, beside the prompt's tokens, and the most that a prompt counts
# for: the prefix cache may have most of a long one.
_ANSWER_TOKENS = 512
_MOST_PROMPT_TOKENS = 8192


def quantum_for(max_context_tokens: int) -> float:
    return min(MAX_QUANTUM, max_context_tokens / 2)


def wanted_tokens(num_prompt_tokens: int) -> int:
    """What a request adds to what its tenant asks for."""
    return min(num_prompt_tokens, _MOST_PROMPT_TOKENS) + _ANSWER_TOKENS


@dataclass(slots=True, eq=False)
class Level:
    """The tenants of one tier and priority, and those of their requests that wait."""

    key: LevelKey
    quantum: float
    accounts: dict[str, TenantAccount] = field(default_factory=dict)
    # Tenants that wait, by a counter that they have at least: it is looked up again when one comes to the top.
    _by_counter: list[tuple[float, str]] = field(default_factory=list)
    # Tenants by what they asked for when it last changed; entries that are no longer true are dropped.
    _by_demand: list[tuple[float, float, str]] = field(default_factory=list)
    num_tenants: int = 0  # with requests that have not ended
    _floor: float = 0.0  # what `least` said when somebody last asked

    def account(self, tenant: str, weight: float) -> TenantAccount:
        """Return the tenant's account; the newest weight counts."""
        account = self.accounts.get(tenant)
        if account is None:
            account = self.accounts[tenant] = TenantAccount(tenant, counter=self.least())
        account.weight = weight
        account.prompt_cost, account.drawn_cost = PROMPT_TOKEN_COST / weight, DRAWN_TOKEN_COST / weight
        return account

    def push(self, request: RequestState) -> None:
        account = request.account
        if not account.waiting:
            # Whoever comes back starts level with those who wait: nothing was saved up, nothing is held against it.
            account.counter = max(account.counter, self.least())
            account.came_with = request.number
            if not account.in_line:
                account.in_line = True
                heapq.heappush(self._by_counter, (account.counter, account.tenant))
        insort(account.waiting, (request.due, request.number, request))
        if len(account.waiting) == 1:
            self._note_demand(account)
        request.queued_tokens = request.remaining
        account.waiting_tokens += request.queued_tokens

    def remove(self, request: RequestState) -> None:
        account = request.account
        del account.waiting[bisect_left(account.waiting, (request.due, request.number))]
        account.waiting_tokens -= request.queued_tokens

    def change_demand(self, account: TenantAccount, num_requests: int, num_tokens: int) -> None:
        """Requests for so many tokens together have come, or ended where both are below zero."""
        had_any = account.num_open > 0
        account.num_open += num_requests
        self.num_tenants += (account.num_open > 0) - had_any
        account.wanted_tokens += num_tokens
        if account.waiting:
            self._note_demand(account)

    def best(self) -> RequestState | None:
        """The request to start next: of the tenant that asks for least, unless it leads the one that got least."""
        least = self._least_account()
        if least is None:
            return None
        chosen = self._most_modest()
        if chosen is None or chosen.counter - least.counter > self.quantum / chosen.weight:
            chosen = least
        return chosen.waiting[0][2]

    def least(self) -> float:
        """The least counter of the tenants that wait; the greatest of all where none does.

        What a tenant gets while nobody waits is nobody's loss, so it is not held against it.
        """
        if self._least_account() is None:
            self._floor = max([self._floor, *[account.counter for account in self.accounts.values()]])
        return self._floor

    def close(self, account: TenantAccount) -> None:
        """Forget a tenant that has no request left here, unless it is ahead of those who wait."""
        if account.num_open == 0 and account.counter <= self.least() and not account.in_line:
            del self.accounts[account.tenant]

    def _least_account(self) -> TenantAccount | None:
        line = self._by_counter
        while line:
            counter, tenant = line[0]
            account = self.accounts[tenant]
            if not account.waiting:
                heapq.heappop(line)
                account.in_line = False
            elif account.counter > counter:
                heapq.heapreplace(line, (account.counter, tenant))
            else:
                self._floor = max(self._floor, counter)
                return account
        return None

    def _note_demand(self, account: TenantAccount) -> None:
        heapq.heappush(self._by_demand, (account.demand, account.counter, account.tenant))
        if len(self._by_demand) > 2 * len(self._by_counter) + 64:
            # Keep one entry, the true one, of each tenant that waits.
            waiting = [self.accounts[tenant] for _, tenant in self._by_counter]
            self._by_demand = [(item.demand, item.counter, item.tenant) for item in waiting if item.waiting]
            heapq.heapify(self._by_demand)

    def _most_modest(self) -> TenantAccount | None:
        while self._by_demand:
            demand, _, tenant = self._by_demand[0]
            account = self.accounts.get(tenant)
            if account is not None and account.waiting and account.demand == demand:
                return account
            heapq.heappop(self._by_demand)
        return None
