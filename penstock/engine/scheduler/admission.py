"""What a request that arrives now can expect, and whether that is what it asks for.

Foresees from the cost model, the pace and who stands before it. Changes nothing. Knows nothing of HTTP.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.engine.scheduler.cost_model import StepShape, with_prompt
from penstock.engine.scheduler.request_state import RequestState, TenantAccount
from penstock.engine.scheduler.serving_pace import ServingPace
from penstock.engine.scheduler.step_times import StepTimes
from penstock.engine.scheduler.waiting_queue import WaitingQueue
from penstock.errors import Overloaded, TargetUnreachable

# Of a target, what a forecast may use: it errs, and a promise that was made is to be kept.
_TTFT_PART = 0.85
_TIME_PER_TOKEN_PART = 0.93
_LEAST_RETRY_SECONDS = 0.001
_UNKNOWN_RETRY_SECONDS = 1.0
# Where no target says how soon a prompt is due: so many times as long as it would take alone.
_PATIENCE = 8.0


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine has taken on."""

    running: Sequence[RequestState]
    waiting: WaitingQueue
    num_free_rows: int
    num_free_blocks: int  # nobody's, and promised to nobody
    block_tokens: int
    mean_output_tokens: float
    may_displace: bool  # the request would get a row although none is free


@dataclass(frozen=True, slots=True)
class Forecast:
    ttft_seconds: float
    token_seconds: float  # between its tokens, while nothing but decoding runs
    alone_seconds: float  # the first token's, if nothing else were there
    tightest_target: float | None  # the least time per token that was promised, its own included
    rows_after: int


class _Queue:
    """What runs before a request: tokens and requests."""

    def __init__(self) -> None:
        self.tokens = 0.0
        self.requests = 0.0


class Admission:
    """Says yes, or no and when."""

    def __init__(self, times: StepTimes, pace: ServingPace) -> None:
        self._times = times
        self._pace = pace

    def due(self, arrival: float, num_prompt_tokens: int, ttft_seconds: float | None) -> float:
        """When a prompt must begin to run to be in time."""
        alone = self._alone_seconds(num_prompt_tokens)
        return arrival + (ttft_seconds - alone if ttft_seconds is not None else (_PATIENCE - 1.0) * alone)

    def forecast(self, request: RequestState, load: Load, now: float) -> Forecast:
        """Foresee the request's first token and its pace behind it."""
        decoding = [other for other in load.running if other.remaining <= 1]
        ahead = _ahead_of(request, load)
        rows_after = len(decoding) + math.ceil(ahead.requests) + 1
        context = sum([other.computed for other in decoding])
        mean_context = (context + ahead.tokens + len(request.tokens)) / rows_after
        targets = [other.targets.time_per_token_seconds for other in (*decoding, request)]
        tightest = min((target for target in targets if target is not None), default=None)
        # Those ahead decode beside the request once their prompts have run: half of them, on the mean.
        rows = len(decoding) + int(ahead.requests / 2)
        shape = StepShape(rows, int(rows * mean_context))
        num_tokens = ahead.tokens + len(request.tokens)
        # The mean over all tokens to run of what lies before them, as far as it is this prompt's own.
        context = int(len(request.tokens) ** 2 / (2 * num_tokens))
        chunk, step_seconds = self._pace.steady_step(shape, tightest, context)
        wait = max(0.0, self._times.free_at(now) - now) + self._wait_for_place(request, load, ahead, step_seconds)
        prefill = self._prefill_seconds(num_tokens, chunk, step_seconds, shape)
        after = StepShape(rows_after, int(rows_after * mean_context))
        return Forecast(
            ttft_seconds=now - request.arrival + wait + prefill,
            token_seconds=self._times.model.seconds(after),
            alone_seconds=self._alone_seconds(len(request.tokens)),
            tightest_target=tightest,
            rows_after=rows_after,
        )

    def check(self, request: RequestState, forecast: Forecast, load: Load) -> str | None:
        """Raise if the targets cannot be kept even by an idle engine; return which cannot be kept now."""
        if request.best_effort or not self._times.model.is_trusted:
            return None
        ttft, deadline = request.targets.ttft_seconds, request.deadline
        if ttft is not None and forecast.ttft_seconds > ttft * _TTFT_PART:
            if forecast.alone_seconds > ttft:
                raise _unreachable("targets.ttft_ms", ttft, forecast.alone_seconds)
            return "ttft"
        if deadline is not None and request.arrival + forecast.ttft_seconds > deadline:
            return "deadline"
        tightest = forecast.tightest_target
        if tightest is not None and not request.is_batch:
            own = request.targets.time_per_token_seconds
            single = self._times.model.seconds(StepShape(1, len(request.tokens)))
            if own is not None and single > own:
                raise _unreachable("targets.time_per_token_ms", own, single)
            if forecast.token_seconds > tightest * _TIME_PER_TOKEN_PART:
                return "time_per_token"
        return None

    def refusal(self, reason: str, request: RequestState, forecast: Forecast, load: Load) -> Overloaded:
        """Say no, and when the forecast would be a yes."""
        if reason == "time_per_token":
            wait = _steps_until_free(load, 1) * forecast.token_seconds
            message = "the batch is as large as the time per token that was promised allows"
        else:
            limit = request.targets.ttft_seconds
            if limit is None:
                limit = (request.deadline or request.arrival) - request.arrival
            wait = forecast.ttft_seconds - limit * _TTFT_PART
            shown = f"{forecast.ttft_seconds * 1000:.0f} ms"
            message = f"the first token would come after {shown}, later than asked for"
        message += "; try again after the time in Retry-After, or accept a late answer with best_effort"
        return Overloaded(message, retry_after_seconds=max(_LEAST_RETRY_SECONDS, wait))

    def place_seconds(self, load: Load) -> float:
        """How long until a place in a full queue is free."""
        if not self._times.model.is_trusted:
            return _UNKNOWN_RETRY_SECONDS
        decoding = [other for other in load.running if other.remaining <= 1]
        shape = StepShape(len(decoding), sum([other.computed for other in decoding]))
        chunk, step_seconds = self._pace.steady_step(shape, None)
        prompts = sum([other.remaining for other in load.running if other.remaining > 1])
        seconds = self._prefill_seconds(prompts, chunk, step_seconds, shape) if prompts else 0.0
        if load.num_free_rows == 0:
            steps_left = _steps_until_free(load, 1) - prompts / max(1, chunk)
            seconds += max(0.0, steps_left) * self._times.model.seconds(shape)
        return max(_LEAST_RETRY_SECONDS, seconds)

    def _alone_seconds(self, num_tokens: int) -> float:
        chunk, seconds = self._pace.steady_step(StepShape(), None, num_tokens // 2)
        return self._prefill_seconds(num_tokens, chunk, seconds, StepShape())

    def _prefill_seconds(self, num_tokens: float, chunk: int, step_seconds: float, shape: StepShape) -> float:
        """How long so many prompt tokens take, `chunk` of them in each step."""
        chunk = max(1, chunk)
        full_steps, rest = divmod(max(1, math.ceil(num_tokens)), chunk)
        last = self._times.model.seconds(with_prompt(shape, rest, 0)) if rest else 0.0
        return full_steps * step_seconds + last

    def _wait_for_place(self, request: RequestState, load: Load, ahead: _Queue, step_seconds: float) -> float:
        """How long until requests have ended that hold the rows and blocks which those ahead and this one need."""
        if load.may_displace:
            return 0.0
        rows_short = math.ceil(ahead.requests) + 1 - load.num_free_rows
        wanted = ahead.tokens + len(request.tokens) + load.mean_output_tokens * (1.0 + ahead.requests)
        blocks_short = wanted / load.block_tokens - load.num_free_blocks
        if rows_short <= 0 and blocks_short <= 0:
            return 0.0
        steps = 0.0
        for left, blocks in _endings(load):
            steps = left
            rows_short -= 1
            blocks_short -= blocks
            if rows_short <= 0 and blocks_short <= 0:
                return steps * step_seconds
        # Those ahead must end too before it is this one's turn.
        return (steps + max(rows_short, 1) * load.mean_output_tokens / max(1, len(load.running))) * step_seconds


def _unreachable(param: str, wanted_seconds: float, least_seconds: float) -> TargetUnreachable:
    return TargetUnreachable(
        f"{param}: {wanted_seconds * 1000:g} ms cannot be kept here: the engine needs about "
        f"{least_seconds * 1000:.3g} ms for this request alone; give it that, or best_effort",
        param=param,
    )


def _ahead_of(request: RequestState, load: Load) -> _Queue:
    """Everything that runs before the request's prompt: prompts under way, and who waits in front of it."""
    queue = _Queue()
    for other in load.running:
        remaining = other.remaining
        if remaining > 1 and other.level <= request.level:
            queue.tokens += remaining
            queue.requests += 1
    own = request.account
    before = [entry[2].queued_tokens for entry in own.waiting if entry[0] <= request.due]
    own_tokens = sum(before)
    queue.tokens += own_tokens
    queue.requests += len(before)
    # Its turn comes when its tenant has got this much; others are served up to there before it.
    turn = own.counter + own_tokens * own.prompt_cost
    for level in load.waiting.levels:
        if level.key > request.level:
            break
        for account in level.accounts.values():
            if account is not own and account.waiting_tokens:
                part = 1.0 if level.key < request.level else _part_before(account, turn)
                queue.tokens += part * account.waiting_tokens
                queue.requests += part * len(account.waiting)
    return queue


def _part_before(account: TenantAccount, turn: float) -> float:
    tokens = (turn - account.counter) / account.prompt_cost
    return min(1.0, max(0.0, tokens / account.waiting_tokens))


def _endings(load: Load) -> list[tuple[float, int]]:
    """(steps left, blocks held) of each running request, those that end first first."""
    return sorted((_steps_left(other, load.mean_output_tokens), len(other.cache.blocks)) for other in load.running)


def _steps_until_free(load: Load, count: int) -> float:
    endings = _endings(load)
    return endings[min(count, len(endings)) - 1][0] if endings else 1.0


def _steps_left(request: RequestState, mean_output_tokens: float) -> float:
    most = request.max_total_tokens - request.known
    if not request.stop_ids and not request.params.stop:
        return float(most)
    return min(float(most), max(1.0, mean_output_tokens - request.num_output_tokens))
