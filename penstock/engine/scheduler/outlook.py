"""What a request that comes later would find, if nobody else came: how the engine's load goes on.

Follows prompts and answers from one end to the next, rather slower than they go. Changes nothing. Knows nothing of
refusals.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.engine.scheduler.cost_model import StepShape
from penstock.engine.scheduler.load import Claim, Load, Queue, ahead_of, expected_endings
from penstock.engine.scheduler.request_state import LevelKey, RequestState
from penstock.engine.scheduler.serving_pace import BATCH_PART, ServingPace
from penstock.engine.scheduler.step_times import StepTimes
from penstock.engine.scheduler.waiting_queue import AGEING_SECONDS

# However much the engine has taken on, it is looked at so often at most.
_MOST_SCENES = 64
# Prompts that take so many times as long as there is time need not be looked at more closely.
_FAR_TIMES = 2.0
# A longer backlog makes longer steps; it is looked at in parts of so many tokens.
_BACKLOG_TOKENS = 4096
# While prompts of several tenants run, rows pause for some of them: they draw a token in this part of the steps.
_SHARED_DRAW_PART = 0.5


@dataclass(frozen=True, slots=True)
class Scene:
    """What decides about a request's first token, at one moment."""

    seconds: float  # from now on
    rest_seconds: float  # until the steps under way are done
    decoding: StepShape  # a step of all that draw tokens and do not give way to the request
    tightest_target: float | None  # the least time per token that was promised to one of those
    ahead: Queue
    is_behind: bool  # all but a worse tier have ended
    has_prompts: bool  # before it or behind it: with its last tokens others' run
    num_free_rows: int
    num_free_blocks: int
    may_displace: bool  # the request would get a row although none is free
    endings: Callable[[], Sequence[tuple[float, int]]]  # of those that have rows, see `expected_endings`
    waiting_answers: Callable[[], Sequence[float]]  # tokens that each of those who wait will draw


def scene_now(request: RequestState, load: Load, times: StepTimes, now: float) -> Scene:
    """What the request finds where it comes now."""
    claim = Claim.of(request, load)
    decoding = [other for other in load.running if other.remaining <= 1 and not _pauses(other, claim)]
    return Scene(
        seconds=0.0,
        rest_seconds=max(0.0, times.free_at(now) - now),
        decoding=StepShape(len(decoding), sum([other.computed for other in decoding])),
        tightest_target=_tightest(decoding),
        ahead=ahead_of(request, load),
        is_behind=False,
        has_prompts=any([other.remaining > 1 and _is_beside(other, request) for other in load.running])
        or any([_is_beside(other, request) for other in load.waiting]),
        num_free_rows=load.num_free_rows,
        num_free_blocks=load.num_free_blocks,
        may_displace=load.may_displace,
        endings=lambda: expected_endings(load.running, load.lengths),
        waiting_answers=lambda: [load.lengths.expected_left(other) for other in load.waiting],
    )


@dataclass(slots=True)
class _Prompt:
    tokens: int
    context_tokens: int  # those, and what has been computed
    answer_tokens: float
    num_blocks: int  # that it needs and has not got
    level: LevelKey
    has_row: bool


class Outlook:
    """The load as one request sees it: what is of a worse tier goes on when the others have ended, and gives way."""

    def __init__(self, request: RequestState, load: Load, times: StepTimes, pace: ServingPace, now: float) -> None:
        self._load = load
        self._times = times
        self._pace = pace
        self._level = request.level
        self._seconds = max(0.0, times.free_at(now) - now)
        self._steps = 0.0
        self._context = 0.0
        self._num_free_rows = load.num_free_rows
        self._num_free_blocks = load.num_free_blocks
        # When a row's answer ends, in steps from now on, and the blocks that it frees.
        self._rows: list[tuple[float, int]] = []
        self._prompts: deque[_Prompt] = deque()
        self._num_prompt_tokens = 0
        self._num_risen = 1  # by how many levels those who wait will have risen
        self._ahead = Queue()
        self._steady: dict[tuple[int, int], tuple[int, float]] = {}  # by rows and prompt tokens
        present = [*load.running, *load.waiting]
        self._members = [other for other in present if _is_beside(other, request)]
        self._others = [other for other in present if not _is_beside(other, request)]
        self._tightest = _tightest(self._members)
        self._is_promised = any([other.targets.ttft_seconds or other.deadline_seconds for other in present])
        # Between tenants it is not foreseen whose turn comes when.
        self.is_shared = len({id(other.account) for other in self._members}) > 1
        self._gives_way = False
        self._others_seconds = self._longest_step(self._others)

    def scene_behind(self) -> Scene:
        """What the request would find where all but a worse tier have ended."""
        return replace(self._scene(), decoding=StepShape(), ahead=Queue(), may_displace=True)

    def scenes(self, room: float) -> Iterator[Scene]:
        """Yield what the request would find, later and later, until nothing is left of the load.

        What is far from giving it its first token within `room` seconds is left out.
        """
        # Rows of a worse tier are there for whoever comes.
        num_lent = sum([other.row is not None for other in self._others])
        self._num_free_rows += num_lent
        self._take_in(self._members)
        yield from self._play(room)
        self._num_free_rows -= num_lent
        self._gives_way = True
        self._take_in(self._others)
        yield from self._play(room)

    def _take_in(self, requests: Sequence[RequestState]) -> None:
        running = [other for other in requests if other.row is not None]
        decoding = [other for other in running if other.remaining <= 1]
        self._context += sum([other.computed for other in decoding])
        self._rows = [(self._steps + left, blocks) for left, blocks in expected_endings(decoding, self._load.lengths)]
        heapq.heapify(self._rows)
        self._prompts.extend(self._prompt(other) for other in running if other.remaining > 1)
        waiting = [self._prompt(other) for other in sorted(requests, key=_urgency) if other.row is None]
        if self.is_shared:
            # With the longest answers last rows are free the latest.
            waiting.sort(key=_length)
        self._prompts.extend(waiting)
        self._num_prompt_tokens = sum([prompt.tokens for prompt in self._prompts])
        self._ahead = self._find_ahead()
        self._steady.clear()

    def _play(self, room: float) -> Iterator[Scene]:
        num_events = max(1, math.ceil((len(self._rows) + 2 * len(self._prompts)) / _MOST_SCENES))
        while self._rows or self._prompts:
            for _ in range(num_events):
                self._advance()
            if not self._is_far(room):
                yield self._scene()

    def _advance(self) -> None:
        """Go on to the end of a prompt or of an answer."""
        if self._seconds > self._num_risen * AGEING_SECONDS:
            self._num_risen = 1 + int(self._seconds / AGEING_SECONDS)
            self._ahead = self._find_ahead()
        if self._prompts and self._can_run(self._prompts[0]):
            self._run_prompt(self._prompts.popleft())
        elif self._rows:
            num_steps = max(0.0, self._rows[0][0] - self._steps)
            self._seconds += num_steps * self._slowed(self._times.model.seconds(self._shape))
            self._draw(num_steps)

    def _can_run(self, prompt: _Prompt) -> bool:
        fits = self._num_free_rows > 0 and self._num_free_blocks >= prompt.num_blocks
        return prompt.has_row or fits or not self._rows

    def _run_prompt(self, prompt: _Prompt) -> None:
        chunk, step_seconds = self._steady_step()
        num_steps = prompt.tokens / max(1, chunk)
        if not self._prompts:
            num_steps = math.ceil(num_steps)
        self._seconds += num_steps * self._slowed(step_seconds)
        self._num_prompt_tokens -= prompt.tokens
        if self._is_ahead(prompt):
            self._ahead.add(prompt.tokens, -1, is_placed=prompt.has_row)
        if not prompt.has_row:
            self._num_free_rows -= 1
            self._num_free_blocks -= prompt.num_blocks
        self._draw(_SHARED_DRAW_PART * num_steps if self.is_shared else num_steps)
        # The step that is planned when an answer ends still has its row in it.
        heapq.heappush(self._rows, (self._steps + prompt.answer_tokens + 1, prompt.num_blocks))
        self._context += prompt.context_tokens

    def _draw(self, num_steps: float) -> None:
        """Draw so many tokens of each answer, and end those that are whole."""
        self._steps += num_steps
        self._context += num_steps * len(self._rows)
        while self._rows and self._rows[0][0] <= self._steps + 1e-9:
            mean_context = self._context / len(self._rows)
            _, num_blocks = heapq.heappop(self._rows)
            self._context -= min(mean_context, num_blocks * self._load.block_tokens)
            self._num_free_rows += 1
            self._num_free_blocks += num_blocks
        self._context = self._context if self._rows else 0.0

    def _steady_step(self) -> tuple[int, float]:
        backlog = 0 if self._is_promised else self._num_prompt_tokens // _BACKLOG_TOKENS * _BACKLOG_TOKENS
        # Among many rows a few more or less change little.
        rows = len(self._rows) if len(self._rows) < 8 else len(self._rows) // 8 * 8
        steady = self._steady.get((rows, backlog))
        if steady is None:
            paced_by = self._tightest if self._rows else None
            steady = self._pace.steady_step(self._shape, paced_by, num_prompt_tokens=backlog)
            self._steady[rows, backlog] = steady
        return steady

    @property
    def _shape(self) -> StepShape:
        return StepShape(len(self._rows), int(self._context))

    def _slowed(self, seconds: float) -> float:
        """What a step takes with as much of a worse tier in it as it may have."""
        return seconds * (1.0 + BATCH_PART) if self._others else seconds

    def _longest_step(self, requests: Sequence[RequestState]) -> float:
        """How long a step of these alone may become: beside rows of as many as there can be."""
        if not requests:
            return 0.0
        num_rows = min(len(requests), len(self._load.running) + self._load.num_free_rows)
        context = sum([other.known for other in requests]) * num_rows // len(requests)
        num_tokens = sum([other.remaining for other in requests if other.remaining > 1])
        shape = StepShape(num_rows, context)
        if not num_tokens:
            return self._times.model.seconds(shape)
        return self._pace.steady_step(shape, None, num_prompt_tokens=num_tokens)[1]

    def _scene(self) -> Scene:
        shape = self._shape
        rest = self._times.model.seconds(shape) if self._rows else 0.0
        if self._prompts:
            rest = self._steady_step()[1]
        return Scene(
            seconds=self._seconds,
            # The others may be at it by then: what is before them may have taken less time than is foreseen.
            rest_seconds=rest if self._gives_way else max(self._slowed(rest), self._others_seconds),
            decoding=StepShape() if self._gives_way else shape,
            tightest_target=self._tightest if self._rows and not self._gives_way else None,
            ahead=Queue() if self._gives_way else replace(self._ahead),
            is_behind=self._gives_way,
            has_prompts=bool(self._prompts) and not self._gives_way,
            num_free_rows=self._num_free_rows,
            num_free_blocks=self._num_free_blocks,
            may_displace=self._load.may_displace or self._gives_way,
            endings=lambda: [(end - self._steps, num_blocks) for end, num_blocks in sorted(self._rows)],
            waiting_answers=lambda: [prompt.answer_tokens for prompt in self._prompts],
        )

    def _find_ahead(self) -> Queue:
        """All prompts that are left: whoever comes later is due later, and others have risen."""
        queue = Queue()
        for prompt in self._prompts:
            if self._is_ahead(prompt):
                queue.add(prompt.tokens, 1, is_placed=prompt.has_row)
        return queue

    def _is_ahead(self, prompt: _Prompt) -> bool:
        tier, rank = self._level
        return prompt.level <= (tier, rank + self._num_risen)

    def _is_far(self, room: float) -> bool:
        if self._gives_way or not self._prompts:
            return False
        chunk, step_seconds = self._steady_step()
        return self._ahead.tokens / max(1, chunk) * step_seconds > _FAR_TIMES * room

    def _prompt(self, request: RequestState) -> _Prompt:
        answer = self._load.lengths.expected_left(request)
        held = len(request.cache.blocks) + request.promised_blocks
        total = math.ceil((request.known + answer) / self._load.block_tokens)
        return _Prompt(
            request.remaining, request.known, answer, max(0, total - held), request.level, request.row is not None
        )


def _is_beside(other: RequestState, request: RequestState) -> bool:
    """Whether the steps are shared with another: a worse tier gets hardly anything of them."""
    return other.level[0] <= request.level[0]


def _pauses(request: RequestState, claim: Claim) -> bool:
    """Whether a running request draws no tokens while the prompt of the claim runs."""
    return request.targets.time_per_token_seconds is None and claim.passes(request)


def _tightest(requests: Sequence[RequestState]) -> float | None:
    targets = [other.targets.time_per_token_seconds for other in requests]
    return min((target for target in targets if target is not None), default=None)


def _length(prompt: _Prompt) -> tuple[LevelKey, float]:
    return prompt.level, prompt.answer_tokens


def _urgency(request: RequestState) -> tuple[LevelKey, float]:
    return request.level, request.due
