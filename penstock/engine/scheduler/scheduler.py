"""Decides, step by step, how many tokens of which requests run.

Plain Python: knows tokens, blocks, rows and the clock; nothing of tensors or HTTP. `next_step` plans, `commit` settles;
one plan may be in flight while the next is made. docs/scheduling.md says how it decides.
"""

import heapq
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.engine.cache.kv_cache import KvCache
from penstock.engine.messages import Submit, TokenEvent
from penstock.engine.metrics import EngineMetrics
from penstock.engine.scheduler import promises
from penstock.engine.scheduler.cost_model import StepShape
from penstock.engine.scheduler.entrance import Entrance
from penstock.engine.scheduler.foresight import Foresight
from penstock.engine.scheduler.idle_capacity import hold_back_batch
from penstock.engine.scheduler.intake import check_submit
from penstock.engine.scheduler.pace import Pace, Ready
from penstock.engine.scheduler.placement import Placement
from penstock.engine.scheduler.precedence import is_left_to
from penstock.engine.scheduler.prompt_work import PromptWork
from penstock.engine.scheduler.request_state import RequestState
from penstock.engine.scheduler.serving_pace import decode_shape
from penstock.engine.scheduler.step_plan import (
    RowSlice,
    SliceResult,
    StepPlan,
    StepResult,
)
from penstock.engine.scheduler.tenant_account import quantum_for
from penstock.engine.speculative.interface import Drafter
from penstock.errors import DeadlineExceeded, EngineFailed, InvalidParameter, PenstockError
from penstock.request import FinishReason, Targets, Tier

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
    """Continuous batching under a token budget, fair between tenants, with prefix reuse and preemption."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KvCache,
        metrics: EngineMetrics,
        *,
        drafter: Drafter | None = None,
        pace: Pace | None = None,
        foresight: Foresight | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert config.max_running <= config.max_step_tokens, "every running request must fit one step"
        assert cache.blocks_for(config.max_context_tokens) <= cache.pool.num_blocks, "one longest request must fit"
        self.config = config
        self.cache = cache
        self.metrics = metrics
        self.requests: dict[int, RequestState] = {}
        self.placement = Placement(
            cache,
            metrics,
            max_running=config.max_running,
            quantum=quantum_for(config.max_context_tokens),
            expected_output_tokens=config.expected_output_tokens,
            clock=clock,
        )
        self.running = self.placement.running  # best first
        self.waiting = self.placement.waiting
        self.entrance = Entrance(
            self.placement, foresight, max_running=config.max_running, max_waiting=config.max_waiting, clock=clock
        )
        self._drafter = drafter
        self._foresight = foresight  # None: nothing is promised
        # None: steps as large as they may be.
        self._pace = foresight.pace if pace is None and foresight is not None else pace
        self._deadlines: list[tuple[float, int]] = []
        self._clock = clock
        self._launched: deque[StepPlan] = deque()
        self._next_number = 0
        self._next_step = 0

    def count_into(self, metrics: EngineMetrics) -> None:
        """Count into these metrics from now on."""
        self.metrics = self.placement.metrics = metrics

    # ------------------------------------------------------------ requests come and go

    def add(self, submit: Submit, client: bytes = b"") -> RequestState:
        """Queue a request. Raises a RequestError, Overloaded or DeadlineExceeded, and then nothing has changed."""
        check_submit(submit, max_context_tokens=self.config.max_context_tokens, vocab_size=self.config.vocab_size)
        request = self._open(submit, client)
        try:
            self.entrance.admit(request)
        except PenstockError:
            self.waiting.dismiss(request)
            raise
        self._next_number += 1
        self.requests[request.number] = request
        self.waiting.push(request, self._clock())
        if self._foresight is not None:
            self._foresight.note_taken(request, self.placement.lengths)
        if request.deadline is not None:
            self._watch_deadline(request.deadline, request.number)
        self.metrics.prompt_tokens += request.num_prompt_tokens
        return request

    def _open(self, submit: Submit, client: bytes) -> RequestState:
        params, num_known = submit.params, len(submit.prompt)
        num_prompt = num_known - submit.num_answer_tokens
        wanted = params.max_tokens if params.max_tokens is not None else self.config.max_context_tokens
        wanted = 1 if self.config.prefill_only else wanted
        if submit.num_answer_tokens >= wanted:
            raise InvalidParameter("num_answer_tokens", submit.num_answer_tokens, "leave at least one token to make")
        eos = () if params.ignore_eos else self.config.eos_token_ids
        level = (int(submit.tier is Tier.BATCH), -submit.priority)
        due = submit.arrival
        if self._foresight is not None:
            due = self._foresight.admission.due(submit.arrival, num_known, submit.targets.ttft_seconds)
        return RequestState(
            number=self._next_number,
            client=client,
            request_id=submit.request_id,
            tokens=list(submit.prompt),
            num_prompt_tokens=num_prompt,
            max_total_tokens=min(num_prompt + wanted, max(num_known + 1, self.config.max_context_tokens)),
            params=params,
            stop_ids=frozenset(eos) | frozenset(params.stop_token_ids),
            seed=params.seed if params.seed is not None else random.getrandbits(63),
            arrival=submit.arrival,
            cache=self.cache.open(
                tenant=submit.tenant, adapter=submit.adapter, num_public_tokens=submit.num_public_tokens
            ),
            account=self.waiting.open_account(level, submit.tenant, submit.weight, num_prompt),
            level=level,
            due=due,
            work=self._work(submit),
            tenant=submit.tenant,
            adapter=submit.adapter,
            targets=_binding_targets(submit),
            deadline_seconds=submit.deadline_seconds,
            best_effort=submit.best_effort,
            target_origins=submit.target_origins,
            has_moved=submit.has_moved,
            num_moved_tokens=submit.num_answer_tokens,
            follows=submit.follows,
            call_answers=submit.call_answers,
        )

    def _work(self, submit: Submit) -> PromptWork:
        if not submit.call_prompts or self._foresight is None:
            return PromptWork.of_one(len(submit.prompt))
        # Whoever asks for a prompt's log-probabilities has all of it computed.
        is_shared = self.cache.shares_prefixes and submit.params.prompt_logprobs is None
        return PromptWork.of_call(
            submit.call_prompts,
            submit.call_answers,
            step_tokens=self._foresight.pace.steady_step(StepShape(), None)[0],
            shared_block_tokens=self.cache.block_tokens if is_shared else None,
        )

    @property
    def queue_seconds(self) -> float:
        """How long a prompt that comes now waits before it runs, as foreseen; 0 where nothing is."""
        if self._foresight is None:
            return 0.0
        return self._foresight.admission.queue_seconds(self.entrance.load(), self._clock())

    @property
    def cost_model_error(self) -> float | None:
        return None if self._foresight is None else self._foresight.model.median_error

    def _watch_deadline(self, deadline: float, number: int) -> None:
        heapq.heappush(self._deadlines, (deadline, number))
        if len(self._deadlines) > 2 * len(self.requests) + 16:
            # Drop those of requests that ended in time once they outnumber the others.
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self.requests]
            heapq.heapify(self._deadlines)

    def end_late(self) -> list[Addressed]:
        """End every request whose deadline has passed, whatever it is doing."""
        ended = []
        now = self._clock() if self._deadlines else 0.0
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self.requests.get(heapq.heappop(self._deadlines)[1])
            if request is not None:
                promises.note_deadline(self.metrics, request)
                event = TokenEvent(
                    request_id=request.request_id,
                    error_code=DeadlineExceeded.code,
                    error="the deadline passed before the answer was complete; give it more time",
                )
                ended.append(self._finish(request, event, FinishReason.ERROR))
        return ended

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
        if self._foresight is not None:
            self._foresight.times.fail(self._clock())
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
        self.placement.note_progress()
        if self._foresight is not None:
            self._foresight.launch.begin()
        if len(self.waiting):
            self.waiting.age(self._clock())
        ready: Sequence[Ready] = self._ready()
        budget = self.config.max_step_tokens
        everybody: Sequence[Ready] = ()  # before some paused
        if len(self.waiting) or any([remaining > 1 for _, remaining in ready]):
            budget = self._step_tokens(ready)
            if self._foresight is not None:
                self.placement.pressed = self._foresight.pledges.pressed(decode_shape(ready), self._clock())
            if len(self.waiting) and self._admit(plan, ready, budget):
                ready = self._ready()
            patient = self.placement.give_way(ready, self._foresight.pace.patience(ready) if self._foresight else None)
            if patient is not ready:
                everybody, ready, budget = ready, patient, self._step_tokens(patient)
        if self._foresight is not None and self.running and self.running[-1].is_batch:
            ready = hold_back_batch(ready, budget, self._foresight)
        self._plan(plan, ready, budget, everybody)
        if plan.has_work:
            plan.slices.sort(key=_place_in_plan)
            plan.tier_copies = self.cache.take_copies()
            plan.wipes = self.cache.take_wipes()
            self._launched.append(plan)
            self._next_step += 1
            if self._foresight is not None:
                self._foresight.times.launch(plan)
        return plan

    def note_launch(self) -> None:
        """The plan is with the runner."""
        if self._foresight is not None:
            self._foresight.launch.end()

    @property
    def launch_due(self) -> float:
        """Until when the next plan may wait without the device having nothing to do; 0.0 for not at all."""
        return 0.0 if self._foresight is None else self._foresight.launch.due()

    def commit(self, result: StepResult) -> list[Addressed]:
        """Settle the oldest launched step. Results of requests that ended meanwhile are dropped."""
        plan = self._launched.popleft()
        assert plan.number == result.number, "steps settle in the order they were launched"
        now = self._clock()
        self.placement.note_progress()
        self.metrics.num_steps += 1
        self.metrics.last_step_monotonic = now
        self.metrics.step.observe(result.seconds)
        if self._foresight is not None:
            self._count_work(plan, self._foresight.times.settle(result.seconds, now), self._foresight.model.costs.fixed)
        events = []
        for piece, outcome in zip(plan.slices, result.slices, strict=True):
            request = self.requests.get(piece.request)
            if request is not None:
                event = self._settle(request, piece, outcome, now)
                if event is not None:
                    events.append(event)
        return events

    def _count_work(self, plan: StepPlan, seconds: float, fixed_seconds: float) -> None:
        """Count what a step's tokens cost; batch requests fill idle capacity and count for nothing."""
        part = 1.0
        if self.running and self.running[-1].is_batch:
            online = [
                piece.num_tokens
                for piece in plan.slices
                if (request := self.requests.get(piece.request)) is None or not request.is_batch
            ]
            part = sum(online) / sum([piece.num_tokens for piece in plan.slices])
        self.metrics.work_seconds += max(0.0, seconds - fixed_seconds) * part

    # ------------------------------------------------------------ planning

    def _ready(self) -> Sequence[Ready]:
        ready = [(request, remaining) for request in self.running if (remaining := request.runnable)]
        if self._pace is None or not self._pace.may_pause or len(self.waiting) > len(self.placement.free_rows):
            return ready
        num_waiting_blocks = sum([self.cache.blocks_for(request.remaining) for request in self.waiting])
        return self._pace.choose(ready, self.waiting) if num_waiting_blocks <= self.cache.pool.num_free else ready

    def _step_tokens(self, ready: Sequence[Ready]) -> int:
        most = self.config.max_step_tokens
        return most if self._pace is None else min(most, self._pace.step_tokens(ready, self.waiting))

    def _plan(self, plan: StepPlan, ready: Sequence[Ready], budget: int, everybody: Sequence[Ready]) -> None:
        """Give running requests their tokens. Who gets blocks is by rank, who gets prompt tokens by urgency."""
        num_singles = sum([remaining == 1 for _, remaining in ready])
        chunks: dict[int, int] = {}
        room = budget - num_singles
        if num_singles < len(ready):
            chunks = self._chunks(ready, room, everybody)
            room -= sum(chunks.values())
        for request, remaining in ready:
            if remaining == 1 and self._drafter is None and self._launch_one(plan, request):
                continue
            if request.row is None:  # preempted for a better one
                continue
            drafts = self._draft(request, room)
            room -= len(drafts)
            num_tokens = 1 + len(drafts) if remaining == 1 else chunks[request.number]
            if num_tokens > 0 and self.placement.make_room(plan, request, request.computed + num_tokens):
                self._launch(plan, request, num_tokens, drafts)

    def _chunks(self, ready: Sequence[Ready], room: int, everybody: Sequence[Ready]) -> dict[int, int]:
        """How many tokens each prompt gets, by the request's number: the most urgent first."""
        place = self.placement.order(ready).of
        prompts = sorted([item for item in ready if item[1] > 1], key=lambda item: place(item[0]))
        seconds = None if self._pace is None else self._pace.step_seconds(ready, self.waiting)
        if seconds is not None and self._foresight is not None:
            shape = decode_shape(ready)
            whole = self.config.max_step_tokens - shape.num_rows if is_left_to(prompts[0][0], ready, everybody) else 0
            assert self._pace is not None
            end_seconds = self._pace.end_seconds(ready, self.waiting)
            return self._foresight.chunks.sizes(prompts, shape, seconds, room, end_seconds, whole_room=whole)
        chunks = {}
        for request, remaining in prompts:
            chunks[request.number] = min(remaining, max(0, room))
            room -= chunks[request.number]
        return chunks

    def _admit(self, plan: StepPlan, ready: Sequence[Ready], budget: int) -> bool:
        """Start waiting requests, best first, while rows, blocks and prompt tokens last. True if anything changed."""
        room = budget - sum([remaining == 1 for _, remaining in ready])
        order = self.placement.order(ready)
        prompts = [(order.of(request), remaining) for request, remaining in ready if remaining > 1]
        changed = False
        while (request := self.placement.next_waiting()) is not None:
            # One that left its row restarts from its tokens, so it waits until the host knows them all.
            if request.in_flight:
                break
            victim = None if self.placement.free_rows else self.placement.displaced_by(request, plan)
            if victim is None and not self.placement.free_rows:
                break
            freed = int(victim is not None and victim.runnable == 1)
            place = order.of(request)
            if sum([remaining for other, remaining in prompts if other < place]) >= room + freed:
                break
            if victim is not None:
                self.placement.park(victim)
                room += freed
                changed = True
            if not self.placement.start(plan, request):
                self.placement.resume_parked(plan)
                return True
            changed = True
            prompts.append((place, request.remaining))
        return changed

    def _launch_one(self, plan: StepPlan, request: RequestState) -> bool:
        """Launch the one token that is left, if it needs no new block. Most steps of most requests are this."""
        start = request.computed
        if request.row is None or start >= len(request.cache.blocks) * self.cache.block_tokens:
            return False
        plan.slices.append(RowSlice(request.number, request.row, start, 1, 1))
        request.computed = start + 1
        request.in_flight += 1
        request.account.counter += request.account.drawn_cost
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
        account = request.account
        if remaining > 1:
            account.counter += account.prompt_cost * (num_tokens - len(drafts))
        if samples:
            request.in_flight += 1
            request.awaits_commit = self._can_draft(request)
            account.counter += account.drawn_cost

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

    # ------------------------------------------------------------ settling

    def _settle(self, request: RequestState, piece: RowSlice, outcome: SliceResult, now: float) -> Addressed | None:
        if outcome.failed:
            return self._finish_failed(request)
        if outcome.prompt_logprobs is not None:
            request.add_prompt_logprobs(piece.start, outcome.prompt_logprobs)
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
        if settled >= (request.cache.num_named + 1) * self.cache.block_tokens and request.cache.blocks:
            self.cache.name_full_blocks(request.cache, request.tokens, settled)
        if not piece.num_samples:
            return None
        return self._report(request, outcome, taken, finish, now)

    def _settle_drafts(self, request: RequestState, piece: RowSlice, taken: list[int]) -> int:
        """Count the guesses that were right. Returns minus the number of the slice's tokens that must run again."""
        num_accepted = len(taken) - 1
        self.metrics.accepted_tokens += num_accepted
        request.account.counter += num_accepted * request.account.drawn_cost
        if request.cache.blocks:
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
            promises.note_first_token(self.metrics, request, now)
            event.num_cached_tokens = request.num_cached_tokens
            if self.cache.block_log is not None:
                event.prompt = self.cache.note(request.cache, request.num_prompt_tokens, request.num_cached_tokens)
            if request.params.prompt_logprobs is not None:
                event.prompt_logprobs = request.take_prompt_logprobs()
        elif request.last_token_at is not None:
            self.metrics.time_per_token.observe((now - request.last_token_at) / max(1, len(taken)))
        request.last_token_at = now
        if finish is None:
            return request.client, event
        if finish is FinishReason.STOP:
            event.stop_token = taken[-1]
        promises.note_end(self.metrics, request)
        return self._finish(request, event, finish)

    def _finish(
        self, request: RequestState, event: TokenEvent, reason: FinishReason, *, forget: bool = False
    ) -> Addressed:
        """The one place where a request ends: exactly one event carries `finish`."""
        del self.requests[request.number]
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.placement.lengths.note(request, stopped=reason is FinishReason.STOP)
        self.placement.release(request, forget=forget)
        if self._foresight is not None:
            self._foresight.note_end(request)
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


def _binding_targets(submit: Submit) -> Targets:
    """Return the targets that the scheduler heeds. A pace that nobody promised makes nobody else wait or be refused."""
    return Targets(submit.targets.ttft_seconds) if submit.best_effort else submit.targets


def _place_in_plan(piece: RowSlice) -> int:
    """Slices of one token come first, the longest context ahead: on a GPU the last to start should be short."""
    return 1 if piece.num_tokens > 1 else -piece.start
