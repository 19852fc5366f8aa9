"""What the engine has taken on, and what of it stands before a request.

Looks at requests; changes nothing. Knows nothing of time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.engine.scheduler.answer_lengths import AnswerLengths
from penstock.engine.scheduler.cost_model import StepShape
from penstock.engine.scheduler.request_state import RequestState, TenantAccount
from penstock.engine.scheduler.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine has taken on."""

    running: Sequence[RequestState]
    waiting: WaitingQueue
    num_free_rows: int
    num_free_blocks: int  # nobody's, and promised to nobody
    block_tokens: int
    lengths: AnswerLengths
    may_displace: bool  # the request would get a row although none is free

    def call_shape(self, request: RequestState) -> StepShape:
        """A step that draws a token of each answer of the request's call, or of as many as have rows at once."""
        num_rows = max(1, min(request.call_answers, len(self.running) + self.num_free_rows))
        return StepShape(num_rows, tokens_asked(request) * num_rows // request.call_answers)


@dataclass(slots=True)
class Queue:
    """What runs before a request."""

    tokens: float = 0.0
    requests: float = 0.0
    # Of those, what has its rows and blocks.
    placed_tokens: float = 0.0
    placed_requests: float = 0.0

    def add(self, num_tokens: int, num_requests: int, *, is_placed: bool) -> None:
        """A request of so many tokens comes (1) or goes (-1)."""
        self.tokens += num_tokens * num_requests
        self.requests += num_requests
        if is_placed:
            self.placed_tokens += num_tokens * num_requests
            self.placed_requests += num_requests


def tokens_asked(request: RequestState) -> int:
    """Prompt tokens to run until the first tokens of all answers of the request's call."""
    return max(len(request.tokens), request.call_tokens or 0)


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request can ask of those that run: whether they leave the steps to its prompt."""

    request: RequestState
    share: float  # of rows, that its tenant will hold with it and those of its own that go before it
    least_counter: float  # who got less does not give way

    @classmethod
    def of(cls, request: RequestState, load: Load) -> "Claim":
        own = request.account
        share = (own.num_rows + len(own.waiting) + request.call_answers) / own.weight
        counter = max(own.counter, load.waiting.least_counter(request.level))
        counter += (own.waiting_tokens + tokens_asked(request)) * own.prompt_cost
        return cls(request, share, counter - load.waiting.quantum / own.weight)

    def passes(self, other: RequestState) -> bool:
        """Whether the request's prompt runs before another's, and without its answer's tokens."""
        if other.level != self.request.level:
            return other.level > self.request.level
        return other.account is not self.request.account and self.outranks(other.account)

    def outranks(self, account: TenantAccount) -> bool:
        """Whether a tenant of the same level has more than the request's will, until its prompt has run."""
        # One of its rows may be the one that the request gets.
        has_more_rows = (account.num_rows - 1) / account.weight > self.share
        return has_more_rows and account.counter >= self.least_counter


def ahead_of(request: RequestState, load: Load) -> Queue:
    """Everything that runs before the request's first token: prompts under way, and who waits in front of it."""
    claim, queue = Claim.of(request, load), Queue()
    for other in load.running:
        if other.remaining > 1 and not claim.passes(other):
            queue.add(other.remaining, 1, is_placed=True)
    own = request.account
    before = [entry[2].queued_tokens for entry in own.waiting if entry[0] <= request.due]
    own_tokens = sum(before)
    queue.tokens += own_tokens
    queue.requests += len(before)
    # Its turn comes when its tenant has got this much, and its prompt's last token when it has got the prompt too;
    # others are served up to there before it.
    turn = max(own.counter, load.waiting.least_counter(request.level)) + own_tokens * own.prompt_cost
    end = turn + tokens_asked(request) * own.prompt_cost
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


def _part_before(account: TenantAccount, turn: float) -> float:
    tokens = (turn - account.counter) / account.prompt_cost
    return min(1.0, max(0.0, tokens / account.waiting_tokens))


def expected_endings(requests: Sequence[RequestState], lengths: AnswerLengths) -> list[tuple[float, int]]:
    """(steps until then, blocks that it frees) of one request's end after another."""
    by_limit = sorted((lengths.most_left(request), len(request.cache.blocks)) for request in requests)
    chance = sum([lengths.chance_to_stop(request) for request in requests])
    # By chance so many stop in each step, whichever they are; who has not stopped ends at its limit.
    return [
        (min(float(most), count / chance if chance else math.inf), blocks)
        for count, (most, blocks) in enumerate(by_limit, start=1)
    ]
