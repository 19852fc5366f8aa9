"""Decides, step by step, how many tokens of which requests run.

Plain Python: knows tokens, blocks, rows and the clock; nothing of tensors, HTTP or how long a step takes. `next_step`
plans, `commit` settles; one plan may be in flight while the next is made.
"""

import random
import time
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from penstock.engine.cache.kv_cache import NO_MATCH, KvCache
from penstock.engine.messages import Submit, TokenEvent
from penstock.engine.metrics import EngineMetrics
from penstock.engine.scheduler.pace import Pace
from penstock.engine.scheduler.request_state import RequestState
from penstock.engine.scheduler.step_plan import (
    BlockAssignment,
    RowSlice,
    RowStart,
    SliceResult,
    StepPlan,
    StepResult,
)
from penstock.engine.scheduler.waiting_queue import WaitingQueue
from penstock.engine.speculative.interface import Drafter
from penstock.errors import ContextTooLong, EngineFailed, InvalidParameter, Overloaded
from penstock.request import FinishReason

# A request preempted this often is promised all the blocks it can ever need before it runs again.
MAX_PREEMPTIONS = 3

# Which client gets which event.
Addressed = tuple[bytes, TokenEvent]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_running: int
    max_step_tokens: int
    max_waiting: int
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    draft_tokens: int = 0
    prefill_only: bool = False  # requests end with their first token; their blocks stay to be exported
    expected_output_tokens: float = 64.0  # the first guess; the mean of finished requests takes over


class Scheduler:
    """Continuous batching under a token budget, with prefix reuse and preemption."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KvCache,
        metrics: EngineMetrics,
        *,
        drafter: Drafter | None = None,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert config.max_running <= config.max_step_tokens, "every running request must fit one step"
        assert cache.blocks_for(config.max_context_tokens) <= cache.pool.num_blocks, "one longest request must fit"
        self.config = config
        self.cache = cache
        self.metrics = metrics
        self.requests: dict[int, RequestState] = {}
        self.running: list[RequestState] = []  # best first: the last is the first to be preempted
        self.waiting = WaitingQueue()
        self._drafter = drafter
        self._pace = pace  # None: steps as large as they may be
        self._clock = clock
        self._free_rows = list(range(config.max_running - 1, -1, -1))
        self._launched: deque[StepPlan] = deque()
        self._next_number = 0
        self._next_step = 0
        self._firmly_promised = 0  # blocks set aside for requests that may not be preempted again
        self._loosely_promised = 0  # estimates: they hold back admission, never a running request
        self._mean_output_tokens = config.expected_output_tokens

    # ------------------------------------------------------------ requests come and go

    def add(self, submit: Submit, client: bytes = b"") -> RequestState:
        """Queue a request. Raises a RequestError or Overloaded, and then nothing has changed."""
        num_prompt = len(submit.prompt)
        if num_prompt == 0:
            raise InvalidParameter("prompt", [], "give at least one token")
        if num_prompt >= self.config.max_context_tokens:
            raise ContextTooLong(num_prompt, self.config.max_context_tokens)
        submit.params.validate(self.config.vocab_size)
        if max(submit.prompt) >= self.config.vocab_size or min(submit.prompt) < 0:
            raise InvalidParameter("prompt", "a token id", f"give token ids from 0 to {self.config.vocab_size - 1}")
        if len(self.waiting) >= self.config.max_waiting + len(self._free_rows):
            self.metrics.num_refused += 1
            raise Overloaded(f"{len(self.waiting)} requests are waiting, which is the limit", retry_after_seconds=1.0)
        params = submit.params
        wanted = params.max_tokens if params.max_tokens is not None else self.config.max_context_tokens
        wanted = 1 if self.config.prefill_only else wanted
        eos = () if params.ignore_eos else self.config.eos_token_ids
        request = RequestState(
            number=self._next_number,
            client=client,
            request_id=submit.request_id,
            tokens=list(submit.prompt),
            num_prompt_tokens=num_prompt,
            max_total_tokens=min(num_prompt + wanted, self.config.max_context_tokens),
            params=params,
            stop_ids=frozenset(eos) | frozenset(params.stop_token_ids),
            seed=params.seed if params.seed is not None else random.getrandbits(63),
            arrival=submit.arrival,
            cache=self.cache.open(
                tenant=submit.tenant, adapter=submit.adapter, num_public_tokens=submit.num_public_tokens
            ),
            tenant=submit.tenant,
            adapter=submit.adapter,
            priority=submit.priority,
        )
        self._next_number += 1
        self.requests[request.number] = request
        self.waiting.push(request)
        self.metrics.prompt_tokens += num_prompt
        return request

    def abort(self, number: int, reason: FinishReason = FinishReason.ABORT) -> Addressed | None:
        """End a request now; its blocks are free for the next plan. None if it had ended."""
        request = self.requests.get(number)
        if request is None:
            return None
        return self._finish(request, TokenEvent(request_id=request.request_id), reason)

    def fail(self, plan_number: int) -> list[Addressed]:
        """End every request of a launched step that could not be run, and trust nothing it touched."""
        plan = self._launched.popleft()
        assert plan.number == plan_number
        self.cache.distrust(plan.tier_copies, plan.wipes)
        events = []
        for piece in plan.slices:
            request = self.requests.get(piece.request)
            if request is not None:
                events.append(self._finish_failed(request))
        return events

    @property
    def has_requests(self) -> bool:
        return bool(self.requests)

    # ------------------------------------------------------------ one step

    def next_step(self) -> StepPlan:
        """Plan the next forward pass, as if every launched one had done its work."""
        plan = StepPlan(self._next_step)
        num_preemptions = self.metrics.num_preemptions
        budget = self._plan_running(plan)
        # After a preemption there is nothing to give away, and the victim's last step is not settled yet.
        if self.metrics.num_preemptions == num_preemptions:
            self._admit(plan, budget)
        if plan.has_work:
            plan.slices.sort(key=_place_in_plan)
            plan.tier_copies = self.cache.take_copies()
            plan.wipes = self.cache.take_wipes()
            self._launched.append(plan)
            self._next_step += 1
        return plan

    def commit(self, result: StepResult) -> list[Addressed]:
        """Settle the oldest launched step. Results of requests that ended meanwhile are dropped."""
        plan = self._launched.popleft()
        assert plan.number == result.number, "steps settle in the order they were launched"
        now = self._clock()
        self.metrics.num_steps += 1
        self.metrics.last_step_monotonic = now
        self.metrics.step.observe(result.seconds)
        events = []
        for piece, outcome in zip(plan.slices, result.slices, strict=True):
            request = self.requests.get(piece.request)
            if request is not None:
                event = self._settle(request, piece, outcome, now)
                if event is not None:
                    events.append(event)
        return events

    # ------------------------------------------------------------ planning

    def _plan_running(self, plan: StepPlan) -> int:
        """Give running requests their tokens, best first; return what is left of the budget."""
        budget = self._step_tokens()
        ready = [(request, remaining) for request in self.running if (remaining := request.runnable)]
        # Prefill chunks leave room for the requests that only need one token.
        singles_left = sum([remaining == 1 for _, remaining in ready])
        for request, remaining in ready:
            if remaining == 1:
                singles_left -= 1
                if self._drafter is None and self._launch_one(plan, request):
                    budget -= 1
                    continue
            if request.row is None:  # preempted for a better one
                continue
            drafts = self._draft(request, budget - singles_left - remaining)
            num_tokens = min(remaining + len(drafts), budget - singles_left)
            if num_tokens <= 0 or not self._make_room(plan, request, request.computed + num_tokens):
                continue
            self._launch(plan, request, num_tokens, drafts)
            budget -= num_tokens
        return budget

    def _step_tokens(self) -> int:
        most = self.config.max_step_tokens
        return most if self._pace is None else min(most, self._pace.step_tokens(self.running, self.waiting))

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Start waiting requests, best first, while rows, blocks and budget last."""
        while budget > 0 and self._free_rows and (request := self.waiting.best()) is not None:
            # A preempted request restarts from its tokens, so it waits until the host knows them all.
            if request.in_flight or not self._start(plan, request):
                return
            num_tokens = min(request.remaining, budget)
            self._take_blocks(plan, request, request.computed + num_tokens)
            self._launch(plan, request, num_tokens, ())
            budget -= num_tokens

    def _start(self, plan: StepPlan, request: RequestState) -> bool:
        """Give a waiting request a row and its cached prefix, if the blocks it is promised are there."""
        match = NO_MATCH if request.params.prompt_logprobs else self.cache.match(request.cache, request.tokens)
        promise = self.cache.blocks_for(self._expected_total(request))
        unpromised = self.cache.pool.num_free - self._firmly_promised - self._loosely_promised
        if promise - match.num_held_blocks > unpromised:
            return False
        self.waiting.remove(request)
        request.computed = self.cache.adopt(request.cache, match)
        request.row = self._free_rows.pop()
        self._promise(request, promise - len(request.cache.blocks))
        insort(self.running, request, key=_rank)
        plan.row_starts.append(
            RowStart(
                request.row,
                list(request.tokens),
                request.num_prompt_tokens,
                request.params,
                request.seed,
                request.adapter,
            )
        )
        self._assign(plan, request, range(len(request.cache.blocks)))
        self.metrics.prefix_query_tokens += len(request.tokens)
        self.metrics.prefix_hit_tokens += request.computed
        if request.admitted_at is None:
            request.admitted_at = self._clock()
            request.num_cached_tokens = request.computed
            self.metrics.queue.observe(request.admitted_at - request.arrival)
        return True

    def _expected_total(self, request: RequestState) -> int:
        """Tokens to set blocks aside for: an estimate, or the most possible once it has been preempted too often."""
        if request.num_preemptions >= MAX_PREEMPTIONS:
            return request.max_total_tokens
        return min(request.max_total_tokens, len(request.tokens) + int(self._mean_output_tokens) + 1)

    def _launch_one(self, plan: StepPlan, request: RequestState) -> bool:
        """Launch the one token that is left, if it needs no new block. Most steps of most requests are this."""
        start = request.computed
        if request.row is None or start >= len(request.cache.blocks) * self.cache.block_tokens:
            return False
        plan.slices.append(RowSlice(request.number, request.row, start, 1, 1))
        request.computed = start + 1
        request.in_flight += 1
        return True

    def _launch(self, plan: StepPlan, request: RequestState, num_tokens: int, drafts: tuple[int, ...]) -> None:
        """Add a slice to the plan and move the request to where it will be once the step has run."""
        assert request.row is not None
        remaining = request.remaining
        drafts = drafts[: max(0, num_tokens - remaining)]
        samples = num_tokens >= remaining
        plan.slices.append(
            RowSlice(
                request.number,
                request.row,
                request.computed,
                num_tokens,
                1 + len(drafts) if samples else 0,
                drafts,
            )
        )
        request.computed += num_tokens - len(drafts)
        if samples:
            request.in_flight += 1
            request.awaits_commit = self._can_draft(request)

    def _can_draft(self, request: RequestState) -> bool:
        # Penalties change with each accepted token, so guesses could not be verified in one pass.
        return self._drafter is not None and not request.params.has_penalties

    def _draft(self, request: RequestState, room: int) -> tuple[int, ...]:
        """Guess the tokens after the known ones, within the step's room and the request's length."""
        if self._drafter is None or request.remaining != 1 or not self._can_draft(request):
            return ()
        most = min(self.config.draft_tokens, room, request.max_total_tokens - len(request.tokens) - 1)
        if most <= 0:
            return ()
        drafts = tuple(self._drafter.propose(request.tokens, most))
        self.metrics.drafted_tokens += len(drafts)
        return drafts

    # ------------------------------------------------------------ blocks

    def _make_room(self, plan: StepPlan, request: RequestState, num_tokens: int) -> bool:
        """Take blocks for a running request, preempting from the end of the line. False if it must wait."""
        needed = self.cache.blocks_for(num_tokens) - len(request.cache.blocks)
        while needed > self._available_to(request):
            victim = self._victim(request)
            if victim is None:
                return False
            self._preempt(victim)
            if victim is request:
                return False
        self._take_blocks(plan, request, num_tokens)
        return True

    def _available_to(self, request: RequestState) -> int:
        own = request.promised_blocks if request.num_preemptions >= MAX_PREEMPTIONS else 0
        return self.cache.pool.num_free - self._firmly_promised + own

    def _victim(self, request: RequestState) -> RequestState | None:
        """The last of the line that may still be preempted, `request` itself at worst."""
        for candidate in reversed(self.running):
            if candidate.num_preemptions < MAX_PREEMPTIONS:
                return candidate
            if candidate is request:
                break
        return None

    def _preempt(self, request: RequestState) -> None:
        """Send a request back to the queue. Its full blocks keep their names, so most of its work is found again."""
        self._leave_row(request)
        request.computed = 0
        request.num_preemptions += 1
        request.awaits_commit = False
        self.metrics.num_preemptions += 1
        self.waiting.push(request)

    def _take_blocks(self, plan: StepPlan, request: RequestState, num_tokens: int) -> None:
        added = self.cache.grow(request.cache, num_tokens)
        self._promise(request, max(0, request.promised_blocks - len(added)))
        self._assign(plan, request, added)

    def _assign(self, plan: StepPlan, request: RequestState, indices: range) -> None:
        assert request.row is not None
        blocks = request.cache.blocks
        plan.block_assignments.extend(BlockAssignment(request.row, index, blocks[index]) for index in indices)

    def _promise(self, request: RequestState, num_blocks: int) -> None:
        change = num_blocks - request.promised_blocks
        request.promised_blocks = num_blocks
        if request.num_preemptions >= MAX_PREEMPTIONS:
            self._firmly_promised += change
        else:
            self._loosely_promised += change

    def _leave_row(self, request: RequestState, *, forget: bool = False) -> None:
        """Take a running request off its row. Safe while its last step runs: steps take effect in order."""
        assert request.row is not None
        self._promise(request, 0)
        self.cache.free(request.cache, forget=forget)
        self.running.remove(request)
        self._free_rows.append(request.row)
        request.row = None

    # ------------------------------------------------------------ settling

    def _settle(self, request: RequestState, piece: RowSlice, outcome: SliceResult, now: float) -> Addressed | None:
        if outcome.failed:
            return self._finish_failed(request)
        if outcome.prompt_logprobs is not None and request.row is not None:
            request.prompt_logprobs.extend(outcome.prompt_logprobs)
        finish = None
        taken = outcome.token_ids
        if piece.num_samples:
            request.in_flight -= 1
            request.awaits_commit = False
            for count, token in enumerate(taken, 1):
                finish = self._take_token(request, token)
                if finish is not None:
                    taken = taken[:count]
                    break
        settled = piece.start + piece.num_tokens
        if piece.drafts:
            settled += self._settle_drafts(request, piece, taken)
        if request.row is not None and settled >= (request.cache.num_named + 1) * self.cache.block_tokens:
            self.cache.name_full_blocks(request.cache, request.tokens, settled)
        if not piece.num_samples:
            return None
        return self._report(request, outcome, taken, finish, now)

    def _settle_drafts(self, request: RequestState, piece: RowSlice, taken: list[int]) -> int:
        """Count the guesses that were right. Returns minus the number of the slice's tokens that must run again."""
        num_accepted = len(taken) - 1
        self.metrics.accepted_tokens += num_accepted
        if request.row is not None:
            # Steps already launched have moved `computed` on; accepted drafts add to it.
            request.computed += num_accepted
        return num_accepted - len(piece.drafts)

    def _take_token(self, request: RequestState, token: int) -> FinishReason | None:
        """Append a sampled token; return why the request ends with it, if it does."""
        request.tokens.append(token)
        self.metrics.generated_tokens += 1
        if token in request.stop_ids and request.num_output_tokens >= request.params.min_tokens:
            return FinishReason.STOP
        if len(request.tokens) >= request.max_total_tokens:
            return FinishReason.LENGTH
        return None

    def _report(
        self, request: RequestState, outcome: SliceResult, taken: list[int], finish: FinishReason | None, now: float
    ) -> Addressed:
        event = TokenEvent(request_id=request.request_id, token_ids=taken)
        if outcome.logprobs is not None:
            event.logprobs = outcome.logprobs[: len(taken)]
        if request.first_token_at is None:
            request.first_token_at = now
            self.metrics.ttft.observe(now - request.arrival)
            event.num_cached_tokens = request.num_cached_tokens
            if request.params.prompt_logprobs:
                event.prompt_logprobs = [None, *request.prompt_logprobs[: request.num_prompt_tokens - 1]]
        elif request.last_token_at is not None:
            self.metrics.time_per_token.observe((now - request.last_token_at) / max(1, len(taken)))
        request.last_token_at = now
        if finish is None:
            return request.client, event
        if finish is FinishReason.STOP:
            event.stop_token = taken[-1]
        self._mean_output_tokens += 0.05 * (request.num_output_tokens - self._mean_output_tokens)
        return self._finish(request, event, finish)

    def _finish(
        self, request: RequestState, event: TokenEvent, reason: FinishReason, *, forget: bool = False
    ) -> Addressed:
        """The one place where a request ends: exactly one event carries `finish`."""
        del self.requests[request.number]
        if request.row is not None:
            self._leave_row(request, forget=forget)
        else:
            self.waiting.remove(request)
        self.metrics.num_finished[reason.value] += 1
        self.metrics.e2e.observe(self._clock() - request.arrival)
        event.finish = reason
        return request.client, event

    def _finish_failed(self, request: RequestState) -> Addressed:
        event = TokenEvent(
            request_id=request.request_id,
            error_code=EngineFailed.code,
            error="the engine failed while it worked on this request; try it again",
        )
        return self._finish(request, event, FinishReason.ERROR, forget=True)


def _rank(request: RequestState) -> tuple[int, float, int]:
    return (-request.priority, request.arrival, request.number)


def _place_in_plan(piece: RowSlice) -> int:
    """Slices of one token come first, the longest context ahead: on a GPU the last to start should be short."""
    return 1 if piece.num_tokens > 1 else -piece.start
