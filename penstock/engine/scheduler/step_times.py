"""When the device will be free, and what the steps that ran teach the cost model.

A step is launched while the one before it runs, so launch to done counts the wait for that one too. What a step itself
took is the time since the step before it was done, where that is the shorter of the two. Knows shapes and clocks only.
"""

from collections import deque
from collections.abc import Callable

from penstock.engine.metrics import QuantileWindow
from penstock.engine.scheduler.cost_model import CostModel, StepShape
from penstock.engine.scheduler.step_plan import StepPlan

_RATIO_WINDOW = 200


class StepTimes:
    """Follows the steps between launch and done."""

    def __init__(self, model: CostModel, clock: Callable[[], float]) -> None:
        self.model = model
        self.ratios = QuantileWindow(_RATIO_WINDOW)  # how long the last steps took, in parts of what was foreseen
        self._clock = clock
        self._launched: deque[tuple[StepShape, float]] = deque()  # shape, when it was launched
        self._last_done: float | None = None
        self.num_launched = 0
        self.num_without_answers = 0  # of the last launched, in a row

    def launch(self, plan: StepPlan) -> None:
        shape = shape_of(plan)
        self._launched.append((shape, self._clock()))
        self.num_launched += 1
        self.num_without_answers = 0 if shape.num_rows else self.num_without_answers + 1

    def settle(self, seconds: float, now: float) -> float:
        """The oldest launched step is done, `seconds` after its launch; return what it took by itself."""
        shape, _ = self._launched.popleft()
        alone = seconds if self._last_done is None else min(seconds, now - self._last_done)
        self._last_done = now
        self.ratios.add(alone / max(self.model.seconds(shape), 1e-9))
        self.model.observe(shape, alone)
        return alone

    def fail(self, now: float) -> None:
        """The oldest launched step could not be run: nothing is learnt from it."""
        self._launched.popleft()
        self._last_done = now

    def has_rested_since(self, moment: float) -> bool:
        """Whether no step has run at any time from then on."""
        return not self._launched and (self._last_done is None or self._last_done <= moment)

    def sole_launched(self) -> tuple[float, float] | None:
        """When the step under way began and how long it should take; None where none is, or another is behind it."""
        if len(self._launched) != 1:
            return None
        shape, launched = self._launched[0]
        began = launched if self._last_done is None else max(self._last_done, launched)
        return began, self.model.seconds(shape)

    def free_at(self, now: float) -> float:
        """When everything that is launched will be done, as far as can be foreseen."""
        done = 0.0 if self._last_done is None else self._last_done
        for shape, launched in self._launched:
            done = max(done, launched) + self.model.seconds(shape)
        return max(now, done)


def shape_of(plan: StepPlan) -> StepShape:
    """What a plan's duration depends on."""
    singles = [piece.start for piece in plan.slices if piece.num_tokens == 1]
    num_rows = len(singles)
    context_tokens = sum(singles) + num_rows
    prompt_tokens = prompt_pairs = 0
    if num_rows < len(plan.slices):
        for piece in plan.slices:
            count = piece.num_tokens
            if count > 1:
                prompt_tokens += count
                prompt_pairs += count * piece.start + count * (count + 1) // 2
    return StepShape(num_rows, context_tokens, prompt_tokens, prompt_pairs)
