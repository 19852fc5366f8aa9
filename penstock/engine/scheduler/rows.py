"""The requests that run, added up once for all who come before the next step changes them.

Whoever arrives asks what it finds. Who runs can be hundreds, and whoever is of one tenant and level gives way together,
so that sums by tenant and level answer as well. Looks at requests; changes nothing. Knows nothing of time.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from penstock.engine.scheduler.answer_lengths import AnswerLengths
from penstock.engine.scheduler.cost_model import StepShape
from penstock.engine.scheduler.request_state import LevelKey, RequestState, TenantAccount


@dataclass(slots=True)
class RowGroup:
    """What runs of one tenant at one level."""

    level: LevelKey
    account: TenantAccount
    # Rows that draw tokens: all, and those with a promised time per token.
    num_drawing: int = 0
    context_tokens: int = 0
    num_paced: int = 0
    paced_context_tokens: int = 0
    tightest_target: float | None = None
    # Rows whose prompts run.
    num_prompts: int = 0
    prompt_tokens: int = 0


# A request's end, in steps from some moment on, the blocks that it frees, and its level.
Ending = tuple[float, int, LevelKey]


class Endings:
    """When requests end, in steps from now on, and how many blocks they free; the first one first."""

    def __init__(self, endings: Sequence[Ending]) -> None:
        self.steps = [steps for steps, _, _ in endings]
        self._freed_blocks = list(accumulate([blocks for _, blocks, _ in endings]))

    def until(self, num_rows: int, num_blocks: float) -> float | None:
        """After how many steps so many rows and blocks are free; None if all that end are too few."""
        index = max(0, num_rows - 1, bisect_left(self._freed_blocks, num_blocks))
        return self.steps[index] if index < len(self.steps) else None


class Rows:
    """All that run, as they are until the next step is planned or settled."""

    def __init__(self, running: Sequence[RequestState], lengths: AnswerLengths) -> None:
        self._running = running
        self._lengths = lengths

    @cached_property
    def groups(self) -> Sequence[RowGroup]:
        groups: dict[int, RowGroup] = {}
        for request in self._running:
            # An account is of one tenant and one level.
            group = groups.get(id(request.account))
            if group is None:
                group = groups[id(request.account)] = RowGroup(request.level, request.account)
            remaining, target = request.remaining, request.targets.time_per_token_seconds
            if remaining > 1:
                group.num_prompts += 1
                group.prompt_tokens += remaining
                continue
            group.num_drawing += 1
            group.context_tokens += request.computed
            if target is not None:
                group.num_paced += 1
                group.paced_context_tokens += request.computed
                group.tightest_target = target if group.tightest_target is None else min(target, group.tightest_target)
        return list(groups.values())

    @cached_property
    def drawing_shape(self) -> StepShape:
        """A step of all that draw tokens."""
        groups = self.groups
        return StepShape(sum([group.num_drawing for group in groups]), sum([group.context_tokens for group in groups]))

    @cached_property
    def endings(self) -> Endings:
        """Of all that run."""
        return Endings(expected_endings(self._running, self._lengths))

    @cached_property
    def drawing_endings(self) -> Endings:
        """Of those that draw tokens."""
        return Endings(expected_endings([row for row in self._running if row.remaining <= 1], self._lengths))

    @cached_property
    def prompts(self) -> Sequence[RequestState]:
        """Those whose prompts run."""
        return [row for row in self._running if row.remaining > 1]


def expected_endings(requests: Sequence[RequestState], lengths: AnswerLengths) -> list[Ending]:
    """One request's end after another."""
    by_limit = sorted([(lengths.most_left(request), len(request.cache.blocks), request.level) for request in requests])
    chance = sum([lengths.chance_to_stop(request) for request in requests])
    # By chance so many stop in each step, whichever they are; who has not stopped ends at its limit.
    return [
        (min(float(most), count / chance if chance else math.inf), blocks, level)
        for count, (most, blocks, level) in enumerate(by_limit, start=1)
    ]
