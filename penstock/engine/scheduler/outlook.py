"""What a request that comes later would find, if nobody else came: how the engine's load goes on.

Follows prompts and answers from one end to the next, rather slower than they go, and keeps what there is at some of
these moments, so that many requests can be looked at with one outlook. Changes nothing. Knows nothing of refusals.
"""

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from operator import ge

from penstock.engine.scheduler.cost_model import StepShape
from penstock.engine.scheduler.load import Load, Queue
from penstock.engine.scheduler.request_state import LevelKey, RequestState
from penstock.engine.scheduler.rows import Ending, Endings, expected_endings
from penstock.engine.scheduler.scene import Scene
from penstock.engine.scheduler.serving_pace import BATCH_PART, ServingPace
from penstock.engine.scheduler.step_times import StepTimes
from penstock.engine.scheduler.waiting_queue import AGEING_SECONDS

# What of a request decides when it could be let in: who asks for more has a greater number in one place, and no smaller
# one in any.
Demand = tuple[float, ...]

# For so many requests that ask for different things one outlook finds the moment that is theirs, and for one of each
# tenant beyond them.
MOST_SEARCHES = 16
# However much the engine has taken on, it is looked at so often at most, and as often what is of a worse tier.
_MOST_MOMENTS = 64
# A longer backlog makes longer steps; it is looked at in parts of so many tokens.
_BACKLOG_TOKENS = 4096
# While prompts of several tenants run, rows pause for some of them: they draw a token in this part of the steps.
_SHARED_DRAW_PART = 0.5


@dataclass(frozen=True)
class Moment:
    """What there is when some of the load has ended."""

    seconds: float  # from when the load was looked at
    rest_seconds: float
    decoding: StepShape
    tightest_target: float | None
    # By level: tokens and requests of all prompts that are left, and of those that have their rows.
    prompts: Sequence[tuple[LevelKey, float, float, float, float]]
    is_behind: bool
    num_free_rows: int
    num_free_blocks: int
    rows: Sequence[Ending]  # in steps until then, and `steps` more
    steps: float
    mean_waiting_answer: float | None

    def scene(self, level: LevelKey, load: Load) -> Scene:
        """What a request of this level finds then."""
        ahead = self._ahead(level)
        return Scene(
            rest_seconds=self.rest_seconds,
            decoding=self.decoding,
            tightest_target=self.tightest_target,
            ahead=ahead,
            tokens_behind=max(0.0, sum([tokens for _, tokens, *_ in self.prompts]) - ahead.tokens),
            is_behind=self.is_behind,
            has_prompts=bool(self.prompts),
            num_free_rows=self.num_free_rows,
            num_free_blocks=self.num_free_blocks,
            may_displace=(lambda _: True) if self.is_behind else partial(self._displaces, level, load),
            endings=lambda: self._endings,
            mean_waiting_answer=lambda: self.mean_waiting_answer,
        )

    def _displaces(self, level: LevelKey, load: Load, num_rows: int) -> bool:
        """Whether a request would get so many rows although none is free; those below it may have ended by then."""
        if any([group.level[0] == level[0] and group.level > level for group in load.rows.groups]):
            return sum([other > level for _, _, other in self.rows]) >= num_rows
        return num_rows == 1 and load.may_displace(1)

    def _ahead(self, level: LevelKey) -> Queue:
        """All prompts that are left: whoever comes later is due later, and others have risen."""
        queue, (tier, rank) = Queue(), level
        worst = (tier, rank + 1 + int(self.seconds / AGEING_SECONDS))
        for other, tokens, requests, placed_tokens, placed_requests in self.prompts:
            if other <= worst:
                queue.add(tokens - placed_tokens, requests - placed_requests, is_placed=False)
                queue.add(placed_tokens, placed_requests, is_placed=True)
        return queue

    @cached_property
    def _endings(self) -> Endings:
        return Endings([(end - self.steps, num_blocks, level) for end, num_blocks, level in sorted(self.rows)])


@dataclass(slots=True)
class _Prompt:
    tokens: int
    context_tokens: int  # those, and what has been computed
    answer_tokens: float
    num_blocks: int  # that it needs and has not got
    level: LevelKey
    has_row: bool


class Outlook:
    """The load as one tier sees it: what is of a worse one goes on when the others have ended, and gives way."""

    def __init__(self, tier: int, load: Load, times: StepTimes, pace: ServingPace, now: float) -> None:
        self._times = times
        self._pace = pace
        self._began = now
        self._version = load.version
        present = [*load.running, *load.waiting]
        members = [other for other in present if other.level[0] <= tier]
        self._accounts = {id(other.account) for other in members}
        self.num_followed = len(present)
        others = [other for other in present if other.level[0] > tier]
        course = _Course(members, others, load, times, pace, now, is_shared=self.is_shared)
        self.behind = replace(course.moment(), is_behind=True)  # where all but a worse tier have ended
        self.moments = list(course.moments())
        self._moment_seconds = [moment.seconds for moment in self.moments]
        # Which moment was found for what requests ask, by tenant.
        self._found: dict[str, dict[Demand, int]] = {}
        self._num_found = 0
        # What was taken in since: prompts, their tokens and those of their answers.
        self._num_added = 0
        self._added_tokens = 0
        self._added_answer_tokens = 0.0

    @property
    def is_shared(self) -> bool:
        """Between tenants it is not foreseen whose turn comes when."""
        return len(self._accounts) > 1

    def is_true(self, load: Load) -> bool:
        """Whether the load is still the one that was looked at."""
        return self._version == load.version and not self._num_added

    def add(self, request: RequestState, answer_tokens: float) -> None:
        """A request was taken in that this outlook does not know: what was found before it came no longer holds."""
        self._found.clear()
        self._accounts.add(id(request.account))
        self._num_added += 1
        self._added_tokens += request.remaining
        self._added_answer_tokens += answer_tokens

    def scene(self, index: int, level: LevelKey, load: Load) -> Scene:
        """What a request of this level finds at a moment."""
        scene = self.moments[index].scene(level, load)
        if not self._num_added or index == len(self.moments) - 1:
            return scene
        # Which of the later steps is under way by then is no longer foreseen, nor whether one of those that came is.
        _, added_seconds = self._pace.steady_step(StepShape(), None, num_prompt_tokens=self._added_tokens)
        return replace(scene, rest_seconds=max(added_seconds, self._longest_rests[index]))

    @cached_property
    def _longest_rests(self) -> Sequence[float]:
        """The longest step from each moment on."""
        return list(accumulate([moment.rest_seconds for moment in reversed(self.moments)], max))[::-1]

    def num_past(self, now: float) -> int:
        """How many of the moments have been."""
        return bisect_left(self._moment_seconds, now - self._began)

    def known_moment(self, tenant: str, demand: Demand, past: int) -> int | None:
        """Return the moment that is told to who asks for this; None if one is to be looked for.

        Once that was done often enough, it is that of another who asked for no less, or the last one: when all that is
        there has ended, whatever is possible at all can be promised. A tenant's first one is always looked for.
        """
        found = self._found.get(tenant, {})
        index = found.get(demand)
        if index is not None and index >= past:
            return index
        if self._num_found < MOST_SEARCHES or not found:
            return None
        enough = [other for asked, other in found.items() if other >= past and all(map(ge, asked, demand))]
        return min(enough, default=len(self.moments) - 1)

    def note_moment(self, tenant: str, demand: Demand, index: int) -> None:
        """A moment was found for who asks for this."""
        self._found.setdefault(tenant, {})[demand] = index
        self._num_found += 1

    def seconds_until(self, index: int, part: float, now: float) -> float:
        """How long until a moment, if all before it takes `part` of what was foreseen.

        As if whatever was taken in since ran alone, one after the other: beside others it takes less.
        """
        return max(0.0, self._began + part * (self._moment_seconds[index] + self._added_seconds()) - now)

    def _added_seconds(self) -> float:
        if not self._num_added:
            return 0.0
        chunk, step_seconds = self._pace.steady_step(StepShape(), None)
        num_steps = self._num_added + self._added_tokens / max(1, chunk)
        context = self._added_tokens + int(self._added_answer_tokens)
        return num_steps * step_seconds + self._added_answer_tokens * self._times.model.seconds(StepShape(1, context))


class _Course:
    """The load on its way to its end."""

    def __init__(
        self,
        members: Sequence[RequestState],
        others: Sequence[RequestState],
        load: Load,
        times: StepTimes,
        pace: ServingPace,
        now: float,
        *,
        is_shared: bool,
    ) -> None:
        self._is_shared = is_shared
        self._load = load
        self._times = times
        self._pace = pace
        self._members = members
        self._others = others  # of a worse tier
        self._seconds = max(0.0, times.free_at(now) - now)
        self._steps = 0.0
        self._context = 0.0
        self._num_free_rows = load.num_free_rows
        self._num_free_blocks = load.num_free_blocks
        self._rows: list[Ending] = []  # the first one first
        self._prompts: deque[_Prompt] = deque()
        self._queues: dict[LevelKey, Queue] = {}  # the same by level
        self._num_prompt_tokens = 0
        self._waiting_answer_tokens = 0.0
        self._steady: dict[tuple[int, int], tuple[int, float]] = {}  # by rows and prompt tokens
        self._tightest = _tightest(members)
        self._is_promised = any([other.is_promised for other in (*members, *others)])
        self._gives_way = False
        self._others_seconds = self._longest_step(others)

    def moments(self) -> Iterator[Moment]:
        """Yield what there is, later and later, until nothing is left of the load."""
        # Rows of a worse tier are there for whoever comes.
        num_lent = sum([other.row is not None for other in self._others])
        self._num_free_rows += num_lent
        self._take_in(self._members)
        yield from self._play()
        self._num_free_rows -= num_lent
        self._gives_way = True
        self._take_in(self._others)
        yield from self._play()

    def moment(self) -> Moment:
        """What there is now."""
        shape = self._shape
        rest = self._times.model.seconds(shape) if self._rows else 0.0
        if self._prompts:
            rest = self._steady_step()[1]
        return Moment(
            seconds=self._seconds,
            # The others may be at it by then: what is before them may have taken less time than is foreseen.
            rest_seconds=rest if self._gives_way else max(self._slowed(rest), self._others_seconds),
            decoding=StepShape() if self._gives_way else shape,
            tightest_target=self._tightest if self._rows and not self._gives_way else None,
            prompts=() if self._gives_way else self._prompts_left(),
            is_behind=self._gives_way,
            num_free_rows=self._num_free_rows,
            num_free_blocks=self._num_free_blocks,
            rows=self._rows.copy(),
            steps=self._steps,
            mean_waiting_answer=self._waiting_answer_tokens / len(self._prompts) if self._prompts else None,
        )

    def _prompts_left(self) -> Sequence[tuple[LevelKey, float, float, float, float]]:
        return [
            (level, queue.tokens, queue.requests, queue.placed_tokens, queue.placed_requests)
            for level, queue in self._queues.items()
            if queue.requests
        ]

    def _take_in(self, requests: Sequence[RequestState]) -> None:
        running = [other for other in requests if other.row is not None]
        decoding = [other for other in running if other.remaining <= 1]
        self._context += sum([other.computed for other in decoding])
        endings = expected_endings(decoding, self._load.lengths)
        self._rows = [(self._steps + left, blocks, level) for left, blocks, level in endings]
        heapq.heapify(self._rows)
        self._prompts.extend([self._prompt(other) for other in running if other.remaining > 1])
        waiting = sorted([other for other in requests if other.row is None], key=_urgency)
        prompts = [self._prompt(other) for other in waiting]
        if self._is_shared:
            # With the longest answers last rows are free the latest.
            prompts.sort(key=_length)
        self._prompts.extend(prompts)
        self._num_prompt_tokens = sum([prompt.tokens for prompt in self._prompts])
        self._waiting_answer_tokens = sum([prompt.answer_tokens for prompt in self._prompts])
        self._queues.clear()
        for prompt in self._prompts:
            queue = self._queues.setdefault(prompt.level, Queue())
            queue.add(prompt.tokens, 1, is_placed=prompt.has_row)
        self._steady.clear()

    def _play(self) -> Iterator[Moment]:
        num_events = max(1, math.ceil((len(self._rows) + 2 * len(self._prompts)) / _MOST_MOMENTS))
        while self._rows or self._prompts:
            for _ in range(num_events):
                self._advance()
            yield self.moment()

    def _advance(self) -> None:
        """Go on to the end of a prompt or of an answer."""
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
        self._waiting_answer_tokens -= prompt.answer_tokens
        self._queues[prompt.level].add(-prompt.tokens, -1, is_placed=prompt.has_row)
        if not prompt.has_row:
            self._num_free_rows -= 1
            self._num_free_blocks -= prompt.num_blocks
        self._draw(_SHARED_DRAW_PART * num_steps if self._is_shared else num_steps)
        # The step that is planned when an answer ends still has its row in it.
        heapq.heappush(self._rows, (self._steps + prompt.answer_tokens + 1, prompt.num_blocks, prompt.level))
        self._context += prompt.context_tokens

    def _draw(self, num_steps: float) -> None:
        """Draw so many tokens of each answer, and end those that are whole."""
        self._steps += num_steps
        self._context += num_steps * len(self._rows)
        while self._rows and self._rows[0][0] <= self._steps + 1e-9:
            mean_context = self._context / len(self._rows)
            _, num_blocks, _ = heapq.heappop(self._rows)
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

    def _prompt(self, request: RequestState) -> _Prompt:
        known, answer = request.known, self._load.lengths.expected_left(request)
        held = len(request.cache.blocks) + request.promised_blocks
        total = math.ceil((known + answer) / self._load.block_tokens)
        num_blocks = max(0, total - held)
        return _Prompt(known - request.computed, known, answer, num_blocks, request.level, request.row is not None)


def _tightest(requests: Sequence[RequestState]) -> float | None:
    targets = [other.targets.time_per_token_seconds for other in requests]
    return min((target for target in targets if target is not None), default=None)


def _length(prompt: _Prompt) -> tuple[LevelKey, float]:
    return prompt.level, prompt.answer_tokens


def _urgency(request: RequestState) -> tuple[LevelKey, float]:
    return request.level, request.due
