"""Steps short enough that whoever waits for tokens gets them in time, and no shorter.

Sizes the prompt part of each step by the cost model. Looks at requests; changes nothing. Knows nothing of blocks.
"""

from collections.abc import Callable, Iterable, Sequence

from penstock.engine.scheduler.cost_model import StepCosts, StepShape, with_prompt
from penstock.engine.scheduler.pace import Pace, Ready
from penstock.engine.scheduler.request_state import RequestState
from penstock.engine.scheduler.step_times import StepTimes

# Without targets, a step with prompts takes at most so many times what its decoding rows take alone: a request that
# arrives meanwhile waits for it.
_DECODE_TIMES = 1.5
# ... but never so little that prompts alone would run slower than this part of the fastest they could.
_LEAST_EFFICIENCY = 0.9
_STEP_SIZES = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
# Of a stated time per token, what a step may use: predictions err by a few per cent.
_TARGET_PART = 0.93
# A request ahead of its target gives away this part of what it has saved, in one step.
_SAVING_PART = 0.25
# However late the answers are: prompts never stand still.
_LEAST_PROMPT_TOKENS = 16
# Batch requests may make a step that online requests wait for longer by this part.
_BATCH_PART = 0.05


class ServingPace(Pace):
    """For requests that somebody waits for."""

    def __init__(self, times: StepTimes, max_step_tokens: int, clock: Callable[[], float]) -> None:
        self._times = times
        self._max_step_tokens = max_step_tokens
        self._clock = clock
        self._efficient_for: StepCosts | None = None
        self._efficient_seconds = 0.0

    def step_tokens(self, ready: Sequence[Ready], waiting: Iterable[RequestState]) -> int:
        singles = [request for request, remaining in ready if remaining == 1]
        shape = StepShape(len(singles), sum([request.computed for request in singles]) + len(singles))
        limited = [request for request in singles if request.targets.time_per_token_seconds is not None]
        seconds = self._room(limited) if limited else self.comfortable_seconds(shape)
        return shape.num_rows + self._prompt_tokens(seconds, shape)

    def steady_step(self, shape: StepShape, time_per_token: float | None) -> tuple[int, float]:
        """Return how many prompt tokens run in a step beside `shape` while prompts wait, and how long it takes."""
        seconds = self.comfortable_seconds(shape) if time_per_token is None else time_per_token * _TARGET_PART
        tokens = self._prompt_tokens(seconds, shape)
        return tokens, self._times.model.seconds(with_prompt(shape, tokens, 0))

    def comfortable_seconds(self, shape: StepShape) -> float:
        """How long a step with prompts may be where nobody said how long."""
        costs = self._times.model.costs
        if costs is not self._efficient_for:
            self._efficient_for, self._efficient_seconds = costs, _efficient_seconds(costs, self._max_step_tokens)
        decode = costs.seconds(shape) if shape.num_rows else 0.0
        return max(_DECODE_TIMES * decode, self._efficient_seconds)

    def batch_allowance(self, shape: StepShape) -> float:
        """How long a step may take with batch work in it, that takes `shape` without."""
        return self._times.model.seconds(shape) * (1.0 + _BATCH_PART)

    def _room(self, limited: Sequence[RequestState]) -> float:
        """How long the next step may take so that each of these keeps its time per token."""
        start = self._times.free_at(self._clock())
        room = float("inf")
        for request in limited:
            target = (request.targets.time_per_token_seconds or 0.0) * _TARGET_PART
            first = request.first_token_at
            if first is None:  # its first token is under way
                saved = target
            else:
                # By the end of this step it will have drawn so many tokens behind the first.
                saved = first + (request.num_output_tokens + request.in_flight) * target - start
            spent = saved if saved < target else target + (saved - target) * _SAVING_PART
            room = min(room, spent)
        return room

    def _prompt_tokens(self, seconds: float, shape: StepShape) -> int:
        most = self._max_step_tokens - shape.num_rows
        fitting = self._times.model.costs.prompt_tokens_within(seconds, shape, 0, most)
        return max(fitting, min(most, _LEAST_PROMPT_TOKENS))


def _efficient_seconds(costs: StepCosts, most: int) -> float:
    """How long the shortest step of prompts is that runs them nearly as fast as the best one would."""
    sizes = [size for size in _STEP_SIZES if size < most] + [most]
    rates = [size / max(costs.seconds(with_prompt(StepShape(), size, 0)), 1e-9) for size in sizes]
    enough = _LEAST_EFFICIENCY * max(rates)
    size = next(size for size, rate in zip(sizes, rates, strict=True) if rate >= enough)
    return costs.seconds(with_prompt(StepShape(), size, 0))
