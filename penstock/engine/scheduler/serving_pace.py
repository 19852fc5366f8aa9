"""Steps short enough that whoever waits for tokens gets them in time, and no shorter.

Sizes the prompt part of each step by the cost model. Looks at requests; changes nothing. Knows nothing of blocks.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from penstock.engine.own_requests import is_own
from penstock.engine.scheduler.cost_model import StepCosts, StepShape, with_prompt
from penstock.engine.scheduler.pace import Pace, Ready
from penstock.engine.scheduler.request_state import RequestState
from penstock.engine.scheduler.step_times import StepTimes
from penstock.tenants import OPEN_TENANT

# Without targets, a step with prompts takes at most so many times what its decoding rows take alone: a request that
# arrives meanwhile waits for it. Less while several tenants are there, so that none waits long for another.
_DECODE_TIMES = 2.3
_SHARED_DECODE_TIMES = 1.75
# Where bursts run whole (see below), a lone prompt beside answers is cut smaller: they gain more by it than it loses.
_LONE_DECODE_TIMES = 1.7
_SHARED_SECONDS = 10.0
# ... or up to this part of the time that all waiting prompts take: with a long queue the one thing that helps is speed.
# Not where callers have names: the next one's should not have to wait for it. Nor where times are promised: what is
# foreseen for them is exact to a step.
_BACKLOG_PART = 0.3
# Steps stay as short as promised times need them so long behind the last request that asked for one, too: what it is
# told, be it a time to come back, is foreseen with them.
_PROMISED_SECONDS = 10.0
# In a burst, though, until the first prompt ends and no longer: whole prompts run faster than pieces, and nobody's
# first token waits for another's prompt. So many that wait are a burst, and so is one that is late: its first token
# will come after more than so many times what the prompt takes. Much later it is no burst but overload: only speed
# helps.
_BURST_PROMPTS = 2
_LATE_TIMES = 3.0
_OVERLOAD_TIMES = 8.0
# While one is as late as this, answers pause for it, for so many steps in a row: a few tokens less in a second for
# those that have begun, and prompts run without what rows cost beside them.
_PAUSE_TIMES = 3.5
MOST_PAUSED_STEPS = 3
# While several tenants are there, speed alone makes no step of prompts longer than one of which this part is what every
# step takes; nor does a long prompt that is not due yet, while short ones come. Shorter steps would slow prompts down
# more than they help the others.
_SHORT_FIXED_PART = 0.45
_LONG_PROMPT_TOKENS = 8192
_SHORT_PROMPT_TOKENS = 2048
_SHORT_SECONDS = 2.0
# Where even the largest step is this small, as on a CPU, cutting prompts further would only make them slower.
_SMALL_STEP_TOKENS = 512
# ... and never so little that prompts alone would run slower than this part of the fastest they could.
_LEAST_EFFICIENCY = 0.9
_LONE_EFFICIENCY = 0.75
_STEP_SIZES = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
# Of a stated time per token, what a step may use: predictions err by a few per cent.
_TARGET_PART = 0.93
# A request ahead of its target gives away this part of what it has saved, in one step.
_SAVING_PART = 0.25
# However late the answers are: prompts never stand still.
LEAST_PROMPT_TOKENS = 16
# Batch requests may make a step that online requests wait for longer by this part.
BATCH_PART = 0.05


class ServingPace(Pace):
    """For requests that somebody waits for."""

    may_pause = True

    def __init__(self, times: StepTimes, max_step_tokens: int, clock: Callable[[], float]) -> None:
        self._times = times
        self.max_step_tokens = max_step_tokens
        self._clock = clock
        self._efficient_for: StepCosts | None = None
        self._efficient_seconds: dict[float, float] = {}  # by how efficient
        self._has_names = False
        self._num_promised = 0  # requests that are there
        self._promised_until = -math.inf
        self._last_arrival: tuple[str, float] | None = None  # tenant and time
        self._shared_until = -math.inf
        self._short_until = -math.inf

    def note_arrival(self, tenant: str, num_prompt_tokens: int) -> None:
        """A request was taken in: while different tenants' follow each other closely, the engine is shared."""
        if is_own(tenant):
            return
        self._has_names = self._has_names or tenant not in ("", OPEN_TENANT)
        now = self._clock()
        if num_prompt_tokens <= _SHORT_PROMPT_TOKENS:
            self._short_until = now + _SHORT_SECONDS
        if self._last_arrival is not None:
            other, at = self._last_arrival
            if other != tenant and now - at < _SHARED_SECONDS:
                self._shared_until = now + _SHARED_SECONDS
        self._last_arrival = (tenant, now)

    @property
    def is_shared(self) -> bool:
        """Whether several tenants are there."""
        return self._clock() < self._shared_until

    def note_stated_time(self) -> None:
        """A request asks to be promised a time."""
        self._promised_until = self._clock() + _PROMISED_SECONDS

    def note_promise(self, request: RequestState) -> None:
        """A request was taken in, perhaps with a promise."""
        self._num_promised += request.is_promised

    def note_end(self, request: RequestState) -> None:
        """A request that was taken in has ended."""
        self._num_promised -= request.is_promised

    def step_tokens(self, ready: Sequence[Ready], waiting: Iterable[RequestState]) -> int:
        shape = decode_shape(ready)
        waiting = list(waiting)
        seconds = max(self.step_seconds(ready, waiting), self.end_seconds(ready, waiting))
        return shape.num_rows + self._prompt_tokens(seconds, shape)

    def step_seconds(self, ready: Sequence[Ready], waiting: Iterable[RequestState]) -> float:
        limited = [
            request
            for request, remaining in ready
            if remaining == 1 and request.targets.time_per_token_seconds is not None
        ]
        if limited and not self.is_shared:
            return self._room(limited)
        prompts = [request for request, remaining in ready if remaining > 1]
        prompts.extend(waiting)
        # Who was promised a time was promised it with short steps.
        is_promised = any([request.is_promised for request in prompts])
        is_burst = self.end_seconds(ready, waiting) > 0.0
        num_tokens = 0 if is_promised or is_burst else sum([request.remaining for request in prompts])
        seconds = self.comfortable_seconds(decode_shape(ready), num_tokens)
        # What one tenant's answers may take is no reason for another's first token to wait for longer steps.
        return min(seconds, self._room(limited)) if limited else seconds

    def end_seconds(self, ready: Sequence[Ready], waiting: Iterable[RequestState]) -> float:
        """How long the next step may take, if that is longer, until a prompt ends."""
        return self._burst(ready, waiting)[0]

    def choose(self, ready: Sequence[Ready], waiting: Iterable[RequestState]) -> Sequence[Ready]:
        if self._times.num_without_answers >= MOST_PAUSED_STEPS:
            return ready
        prompts = [item for item in ready if item[1] > 1]
        waiting = list(waiting)
        if (not prompts and not waiting) or self._burst(ready, waiting)[1] < _PAUSE_TIMES:
            return ready
        return prompts

    def _burst(self, ready: Sequence[Ready], waiting: Iterable[RequestState]) -> tuple[float, float]:
        """Return when the latest first token of a burst will come, and how many times its prompt's own time that is."""
        if not self._may_hurry:
            return 0.0, 0.0
        token_seconds = self._times.model.costs.token_seconds
        now = self._clock()
        num_prompts = num_tokens = 0
        latest_seconds = latest_times = 0.0
        for request in _first_tokens_due(ready, waiting):
            num_prompts += 1
            num_tokens += request.remaining
            seconds = now - request.arrival + num_tokens * token_seconds
            times = seconds / max(request.num_prompt_tokens * token_seconds, 1e-9)
            if times > _OVERLOAD_TIMES:
                return 0.0, 0.0
            if times > latest_times:
                latest_seconds, latest_times = seconds, times
        is_burst = num_prompts >= _BURST_PROMPTS or latest_times > _LATE_TIMES
        return (latest_seconds, latest_times) if is_burst else (0.0, 0.0)

    def steady_step(
        self, shape: StepShape, time_per_token: float | None, context: int = 0, num_prompt_tokens: int = 0
    ) -> tuple[int, float]:
        """Return how many prompt tokens run in a step beside `shape` while prompts wait, and how long it takes.

        `context` is how much of their prompts lies before these tokens, and `num_prompt_tokens` are theirs where none
        of them was promised a time.
        """
        seconds = self.comfortable_seconds(shape, num_prompt_tokens)
        if time_per_token is not None:
            paced = time_per_token * _TARGET_PART
            seconds = min(seconds, paced) if self.is_shared else paced
        tokens = self._prompt_tokens(seconds, shape, context)
        return tokens, self._times.model.seconds(with_prompt(shape, tokens, context))

    def comfortable_seconds(self, shape: StepShape, num_prompt_tokens: int = 0) -> float:
        """How long a step with prompts may be where nobody said how long, and so many prompt tokens wait."""
        is_shared = self.is_shared
        if not is_shared and (self.max_step_tokens <= _SMALL_STEP_TOKENS or not self._times.model.is_trusted):
            return float("inf")
        if is_shared:
            times, least = _SHARED_DECODE_TIMES, self._short_seconds()
        elif shape.num_rows and self._may_hurry:
            times, least = _LONE_DECODE_TIMES, self._least_efficient_seconds(_LONE_EFFICIENCY)
        else:
            times, least = _DECODE_TIMES, self._least_efficient_seconds()
        limit = max(times * self._decode_seconds(shape), least)
        if not self._has_names and not self._has_times:
            limit = max(limit, _BACKLOG_PART * num_prompt_tokens * self._times.model.costs.token_seconds)
        return limit

    def patient_seconds(self, shape: StepShape) -> float:
        """How long a step may be made by prompts that can wait, so that short ones which come do not wait long."""
        if self._clock() >= self._short_until:
            return float("inf")
        return max(_SHARED_DECODE_TIMES * self._decode_seconds(shape), self._short_seconds())

    def patience(self, ready: Sequence[Ready]) -> Callable[[RequestState], bool] | None:
        """Return what tells whether a row keeps its stated times if it leaves the next step to others.

        Its time per token, where a step takes no more of what it has saved than it gives away in one; its deadline,
        where the tokens that it must have would end before it in the longest steps. None: no such row pauses.
        """
        if not self._has_times:
            return None
        longest = self.comfortable_seconds(decode_shape(ready))
        start = self._times.free_at(self._clock())

        def can_pause(request: RequestState) -> bool:
            if request.has_near_deadline and start + (request.fewest_left + 1) * longest > (request.deadline or 0.0):
                return False
            if request.targets.time_per_token_seconds is None:
                return True
            target = _step_target(request)
            return (_saved(request, target, start) - target) * _SAVING_PART >= longest

        return can_pause

    def can_wait(self, request: RequestState, remaining: int) -> bool:
        """Whether a prompt is long and need not begin yet to be in time."""
        is_long = request.num_prompt_tokens > _LONG_PROMPT_TOKENS and remaining > _SHORT_PROMPT_TOKENS
        return is_long and self._clock() < request.due

    def batch_allowance(self, shape: StepShape) -> float:
        """How long a step may take with batch work in it, that takes `shape` without."""
        return self._times.model.seconds(shape) * (1.0 + BATCH_PART)

    @property
    def _has_times(self) -> bool:
        """Whether callers are promised times."""
        return self._num_promised > 0 or self._clock() < self._promised_until

    @property
    def _may_hurry(self) -> bool:
        """Whether nobody is there for whom steps must stay short."""
        is_large = self.max_step_tokens > _SMALL_STEP_TOKENS
        is_strict = self._has_names or self._has_times or self.is_shared
        return is_large and not is_strict and self._times.model.is_trusted

    def _short_seconds(self) -> float:
        """How long a step of prompts is while others should not wait long for it."""
        short = self._times.model.seconds(with_prompt(StepShape(), 1, 0)) / _SHORT_FIXED_PART
        return min(short, self._least_efficient_seconds())

    def _decode_seconds(self, shape: StepShape) -> float:
        return self._times.model.seconds(shape) if shape.num_rows else 0.0

    def _least_efficient_seconds(self, efficiency: float = _LEAST_EFFICIENCY) -> float:
        costs = self._times.model.costs
        if costs is not self._efficient_for:
            self._efficient_for = costs
            self._efficient_seconds = {
                each: _efficient_seconds(costs, self.max_step_tokens, each)
                for each in (_LEAST_EFFICIENCY, _LONE_EFFICIENCY)
            }
        return self._efficient_seconds[efficiency]

    def _room(self, limited: Sequence[RequestState]) -> float:
        """How long the next step may take so that each of these keeps its time per token."""
        start = self._times.free_at(self._clock())
        room = float("inf")
        for request in limited:
            target = _step_target(request)
            saved = _saved(request, target, start)
            spent = saved if saved < target else target + (saved - target) * _SAVING_PART
            room = min(room, spent)
        return room

    def _prompt_tokens(self, seconds: float, shape: StepShape, context: int = 0) -> int:
        most = self.max_step_tokens - shape.num_rows
        fitting = self._times.model.costs.prompt_tokens_within(seconds, shape, context, most)
        return max(fitting, min(most, LEAST_PROMPT_TOKENS))


def _step_target(request: RequestState) -> float:
    """Of the stated time per token, what a step may use."""
    return (request.targets.time_per_token_seconds or 0.0) * _TARGET_PART


def _saved(request: RequestState, target: float, start: float) -> float:
    """How long a step that begins at `start` may take before the request is behind its target."""
    first = request.first_token_at
    if first is None:
        return target
    # By the end of this step it will have drawn so many tokens behind the first, which may be under way.
    return first + (request.num_drawn_tokens + request.in_flight) * target - start


def _first_tokens_due(ready: Sequence[Ready], waiting: Iterable[RequestState]) -> Iterator[RequestState]:
    """Yield whose first token somebody waits for, in about the order in which they run."""
    prompts = (request for request, remaining in ready if remaining > 1)
    for request in chain(prompts, waiting):
        if request.first_token_at is None and not request.is_batch:
            yield request


def decode_shape(ready: Sequence[Ready]) -> StepShape:
    """A step of those that run one token."""
    contexts = [request.computed + 1 for request, remaining in ready if remaining == 1]
    return StepShape(len(contexts), sum(contexts))


def _efficient_seconds(costs: StepCosts, most: int, efficiency: float) -> float:
    """How long the shortest step of prompts is that runs them at this part of the best one's speed."""
    sizes = [size for size in _STEP_SIZES if size < most] + [most]
    rates = [size / max(costs.seconds(with_prompt(StepShape(), size, 0)), 1e-9) for size in sizes]
    enough = efficiency * max(rates)
    size = next(size for size, rate in zip(sizes, rates, strict=True) if rate >= enough)
    return costs.seconds(with_prompt(StepShape(), size, 0))
