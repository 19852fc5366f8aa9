"""Runs plans on a device that is only a profile: steps take as long as they would, tokens come from a hash.

Steps run back to back in the order of their launch, as on a stream. Real or virtual time: whatever clock it is given.
Knows nothing of queues, clients or text.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.engine.runner.interface import LaunchedStep, Runner
from penstock.engine.scheduler.step_plan import RowSlice, RowStart, SliceResult, StepPlan, StepResult
from penstock.engine.simulated.language import SimulatedLanguage
from penstock.engine.simulated.profile import Profile
from penstock.engine.simulated.step_cost import cost_of
from penstock.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Timing:
    """Where time comes from. The default is the real one."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def sleep_until(self, moment: float) -> None:
        seconds = moment - self.now()
        if seconds > 0:
            self.sleep(seconds)


@dataclass(slots=True)
class _Row:
    """A row's owner: what it has said so far, as a history."""

    history: int = 0
    num_prompt_tokens: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0


class SimulatedRunner(Runner):
    """One device. Tokens are drawn at launch and told at `wait`, when the step would have ended."""

    def __init__(self, profile: Profile, language: SimulatedLanguage, num_rows: int, timing: Timing) -> None:
        self._profile = profile
        self._language = language
        self._rows = [_Row() for _ in range(num_rows)]
        self._timing = timing
        self.free_at = -math.inf  # when the last launched step ends
        self.busy_seconds = 0.0  # of the device, with steps

    @property
    def step_sizes(self) -> Sequence[int]:
        return self._profile.mixed.graph_tokens

    def launch(self, plan: StepPlan) -> LaunchedStep:
        launched_at = self._timing.now()
        cost = cost_of(self._profile, plan)
        results = self._run(plan)
        self._timing.sleep_until(launched_at + cost.launch)
        self.busy_seconds += cost.run
        # The device begins with what the host has queued so far, but cannot end before the host has queued it all.
        self.free_at = max(max(self.free_at, launched_at) + cost.run, self._timing.now())
        result = StepResult(plan.number, results, self.free_at - launched_at)
        return _SimulatedStep(result, self.free_at, self._timing)

    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        self._copy(len(blocks))
        return [b""] * len(blocks)

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        assert len(blocks) == len(contents)
        self._copy(len(blocks))

    def close(self) -> None:
        self._rows.clear()

    def _copy(self, num_blocks: int) -> None:
        """Take the time of reading or writing blocks, after every launched step."""
        self.free_at = max(self.free_at, self._timing.now()) + num_blocks * self._profile.tier_block_ms / 1e3
        self._timing.sleep_until(self.free_at)

    def _run(self, plan: StepPlan) -> list[SliceResult]:
        for start in plan.row_starts:
            self._rows[start.row] = self._started(start)
        return [self._run_slice(piece) for piece in plan.slices]

    def _started(self, start: RowStart) -> _Row:
        history = self._language.history(start.token_ids)
        return _Row(history, start.num_prompt_tokens, start.params, start.seed)

    def _run_slice(self, piece: RowSlice) -> SliceResult:
        row = self._rows[piece.row]
        result = SliceResult([])
        if piece.num_samples:
            result.token_ids = self._draw(row, piece)
            if row.params.logprobs is not None:
                result.logprobs = [self._language.logprob(token, row.params.logprobs) for token in result.token_ids]
        if row.params.prompt_logprobs is not None:
            scored = min(piece.start + piece.num_tokens, row.num_prompt_tokens - 1) - piece.start
            if scored > 0:
                result.prompt_logprobs = self._language.prompt_logprobs(scored, row.params.prompt_logprobs)
        return result

    def _draw(self, row: _Row, piece: RowSlice) -> list[int]:
        """Draw a token, and another after each guess that was right."""
        drawn: list[int] = []
        for guess in (*piece.drafts, None):
            token = self._language.draw(row.history, row.params, row.seed)
            row.history = self._language.push(row.history, token)
            drawn.append(token)
            if token != guess:
                break
        return drawn


class _SimulatedStep(LaunchedStep):
    def __init__(self, result: StepResult, ends_at: float, timing: Timing) -> None:
        self._result = result
        self._ends_at = ends_at
        self._timing = timing

    @property
    def is_done(self) -> bool:
        return self._timing.now() >= self._ends_at

    def wait(self) -> StepResult:
        self._timing.sleep_until(self._ends_at)
        return self._result
