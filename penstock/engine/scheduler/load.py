"""What the engine has taken on, and what of it stands before a request.

Looks at requests; changes nothing. Knows nothing of time.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.engine.scheduler.answer_lengths import AnswerLengths
from penstock.engine.scheduler.cost_model import StepShape
from penstock.engine.scheduler.request_state import LevelKey, RequestState, TenantAccount
from penstock.engine.scheduler.rows import Rows
from penstock.engine.scheduler.tenant_account import wanted_tokens
from penstock.engine.scheduler.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine has taken on."""

    running: Sequence[RequestState]
    rows: Rows  # the same, added up
    version: int  # another one after each step, and when somebody has left
    waiting: WaitingQueue
    num_free_rows: int
    num_blocks: int  # all that there are
    num_free_blocks: int  # nobody's, and promised to nobody
    block_tokens: int
    lengths: AnswerLengths
    may_displace: Callable[[int], bool]  # whether the request would get so many rows although none is free
    mean_waiting_answer: Callable[[], float | None]  # tokens that those who wait will draw; None where nobody does

    def call_shape(self, request: RequestState) -> StepShape:
        """A step that draws a token of each answer of the request's call, or of as many as begin at once."""
        num_rows = self._num_rows(request, self._first_tokens(request))
        return StepShape(num_rows, request.work.read_tokens * num_rows // request.call_answers)

    def num_rounds(self, request: RequestState) -> int:
        """How many answers of the request's call must come one behind the other, for want of rows or blocks."""
        return -(-request.call_answers // self._num_rows(request, self.lengths.expected_left(request)))

    def wanted_tokens(self, request: RequestState, num_rows: int) -> float:
        """What so many answers of the request's call hold when they begin, and what is set aside for them then."""
        wanted = _call_tokens(request, num_rows, self._first_tokens(request))
        return min(wanted, self.num_blocks * self.block_tokens)

    def _first_tokens(self, request: RequestState) -> float:
        """Tokens of an answer that it is given room for when it begins."""
        return min(self.lengths.mean_tokens, request.max_total_tokens - len(request.tokens))

    def _num_rows(self, request: RequestState, answer_tokens: float) -> int:
        """How many answers of the request's call, of so many tokens, have rows and blocks at once."""
        num_rows = max(1, min(request.call_answers, len(self.running) + self.num_free_rows))
        if num_rows == 1:
            return 1
        most, answer = self.num_blocks * self.block_tokens, answer_tokens + self.block_tokens
        counts = range(2, num_rows + 1)
        return 1 + bisect_left(counts, True, key=lambda count: _call_tokens(request, count, answer) > most)


def _call_tokens(request: RequestState, num_answers: int, answer_tokens: float) -> float:
    return request.work.held_tokens(num_answers) + num_answers * answer_tokens


@dataclass(slots=True)
class Queue:
    """What runs before a request."""

    tokens: float = 0.0
    requests: float = 0.0
    # Of those, what has its rows and blocks.
    placed_tokens: float = 0.0
    placed_requests: float = 0.0

    def add(self, num_tokens: float, num_requests: float, *, is_placed: bool) -> None:
        """Requests of so many tokens together come, or go where both are below zero."""
        self.tokens += num_tokens
        self.requests += num_requests
        if is_placed:
            self.placed_tokens += num_tokens
            self.placed_requests += num_requests


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request can ask of those that run: whether they leave the steps to its prompt."""

    request: RequestState
    demand: float  # of its tenant, with it, over its weight
    num_requests: float  # the same
    least_counter: float  # who got less does not give way

    @classmethod
    def of(cls, request: RequestState, load: Load) -> "Claim":
        own = request.account
        # Of a call this request is counted already.
        num_coming = (request.call_answers - 1) / own.weight
        demand = own.demand + num_coming * wanted_tokens(request.num_prompt_tokens)
        num_requests = own.num_open / own.weight + num_coming
        counter = max(own.counter, load.waiting.least_counter(request.level))
        counter += (own.waiting_tokens + request.work.tokens) * own.prompt_cost
        return cls(request, demand, num_requests, counter - load.waiting.quantum / own.weight)

    def passes(self, level: LevelKey, account: TenantAccount) -> bool:
        """Whether the request's prompt runs before a tenant's of this level, and without its answers' tokens."""
        if level != self.request.level:
            return level > self.request.level
        return account is not self.request.account and self.outranks(account)

    def outranks(self, account: TenantAccount) -> bool:
        """Whether a tenant of the same level asks for more than the request's, until its prompt has run."""
        return account.exceeds(self.demand, self.num_requests) and account.counter >= self.least_counter


def ahead_of(claim: Claim, load: Load) -> Queue:
    """Everything that runs before the request's first token: prompts under way, and who waits in front of it."""
    request, queue = claim.request, Queue()
    for group in load.rows.groups:
        if group.num_prompts and not claim.passes(group.level, group.account):
            queue.add(group.prompt_tokens, group.num_prompts, is_placed=True)
    own = request.account
    before = [entry[2].queued_tokens for entry in own.waiting if entry[0] <= request.due]
    own_tokens = sum(before)
    queue.tokens += own_tokens
    queue.requests += len(before)
    # Its turn comes when its tenant has got this much, and its prompt's last token when it has got the prompt too;
    # others are served up to there before it.
    turn = max(own.counter, load.waiting.least_counter(request.level)) + own_tokens * own.prompt_cost
    end = turn + request.work.tokens * own.prompt_cost
    for level in load.waiting.levels:
        if level.key > request.level:
            break
        for account in level.accounts.values():
            if account is not own and account.waiting_tokens:
                part = 1.0
                if level.key == request.level:
                    part = _part_before(account, turn if claim.outranks(account) else end)
                queue.tokens += part * account.waiting_tokens
                queue.requests += part * len(account.waiting)
    return queue


def prompt_tokens(tier: int, load: Load) -> int:
    """Tokens of all prompts that have not run, of this tier or a better one."""
    running = [group.prompt_tokens for group in load.rows.groups if group.level[0] <= tier]
    levels = [level for level in load.waiting.levels if level.key[0] <= tier]
    waiting = [account.waiting_tokens for level in levels for account in level.accounts.values()]
    return sum(running) + sum(waiting)


def _part_before(account: TenantAccount, turn: float) -> float:
    tokens = (turn - account.counter) / account.prompt_cost
    return min(1.0, max(0.0, tokens / account.waiting_tokens))
