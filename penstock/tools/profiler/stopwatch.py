"""Times steps on a runner, back to back as the engine runs them.

Drives the runner with plans of its own: rows whose tokens and blocks are set once, any stretch of which can run. Knows
nothing of schedulers or models.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from statistics import median

from penstock.engine.config import EngineConfig
from penstock.engine.runner.interface import LaunchedStep, Runner
from penstock.engine.scheduler.step_plan import BlockAssignment, RowSlice, RowStart, StepPlan, TierCopy
from penstock.request import SamplingParams
from penstock.tools.profiler.steps import TimedStep

_LEAST_STEPS, _MOST_STEPS = 3, 8
_ENOUGH_SECONDS = 0.4  # once a step has had the least number of runs
# A device that has been busy for a while runs slower than one that begins: by its power limit, and as servers use it.
_WARM_UP_SECONDS = {"cuda": 0.15, "cpu": 0.0}
_COPIED_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class Timed:
    """One step's median times."""

    step: TimedStep
    ms: float  # from the end of the step before to its own end
    launch_ms: float


class Stopwatch:
    """One runner, which must not be used by anybody else meanwhile."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        vocab_size: int,
        *,
        max_context: int,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._config = config
        self._max_context = max_context
        self._now = now
        self._numbers = count(1 << 32)
        # On CUDA a size is captured the second time that it is wanted.
        self._num_warm_up = 3 if config.device == "cuda" else 1
        self._warm_up_seconds = _WARM_UP_SECONDS[config.device_kind]
        self._fill_rows(vocab_size)

    def time(self, step: TimedStep, copies: Sequence[TierCopy] = ()) -> Timed:
        """Run a step again and again, the next one launched before each ends; return its medians."""
        slices = step.slices
        ends: list[float] = []
        launches: list[float] = []
        num_cold = 0
        started = self._now()
        warm_at = started + self._warm_up_seconds
        previous = self._launch(slices, copies)
        while not self._is_enough(len(ends) - num_cold, started):
            before = self._now()
            launched = self._launch(slices, copies)
            launches.append(self._now() - before)
            previous.wait()
            ends.append(self._now())
            previous = launched
            if len(ends) <= self._num_warm_up or ends[-1] < warm_at:
                num_cold, started = len(ends), ends[-1]
        previous.wait()
        intervals = [after - before for before, after in pairwise(ends)][num_cold - 1 :]
        return Timed(step, 1e3 * median(intervals), 1e3 * median(launches[num_cold:]))

    def time_block_copy(self) -> float | None:
        """Milliseconds to copy one block to the host tier; None where there is no such tier."""
        num_copies = min(_COPIED_BLOCKS, self._config.num_host_slots, self._config.num_blocks - 1)
        if num_copies == 0:
            return None
        step = TimedStep((16,))
        copies = [TierCopy(index + 1, index, to_host=True) for index in range(num_copies)]
        return max(0.0, self.time(step, copies).ms - self.time(step).ms) / num_copies

    def _is_enough(self, num_timed: int, started: float) -> bool:
        if num_timed < _LEAST_STEPS:
            return False
        return num_timed >= _MOST_STEPS or self._now() - started >= _ENOUGH_SECONDS

    def _launch(self, slices: list[RowSlice], copies: Sequence[TierCopy]) -> LaunchedStep:
        return self._runner.launch(StepPlan(next(self._numbers), list(slices), tier_copies=list(copies)))

    def _fill_rows(self, vocab_size: int) -> None:
        """Give every row as many tokens as may be timed, and blocks of its own as far as there are enough."""
        config = self._config
        blocks_each = -(-self._max_context // config.block_tokens)
        rng = random.Random(0)
        params = SamplingParams(temperature=1.0, ignore_eos=True)
        plan = StepPlan(next(self._numbers), [RowSlice(0, 0, 0, min(self._max_context, config.block_tokens), 1)])
        for row in range(config.max_running):
            tokens = [rng.randrange(vocab_size) for _ in range(self._max_context)]
            plan.row_starts.append(RowStart(row, tokens, len(tokens), params, seed=row))
            for index in range(blocks_each):
                block = 1 + (index * config.max_running + row) % (config.num_blocks - 1)
                plan.block_assignments.append(BlockAssignment(row, index, block))
        self._runner.launch(plan).wait()
        if config.device_kind == "cpu":
            self._touch_blocks(min(config.num_blocks - 1, blocks_each * config.max_running))

    def _touch_blocks(self, num_blocks: int) -> None:
        """Write every block: pages of a host that nobody wrote to are all the same page, and read too fast."""
        (content,) = self._runner.read_blocks([1])
        for block in range(2, num_blocks + 1):
            self._runner.write_blocks([block], [content])
