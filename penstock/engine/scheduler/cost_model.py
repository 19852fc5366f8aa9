"""How long a step takes, learnt from the steps that ran.

    seconds = fixed + prompt step + prompt attention + rows + context read + tokens beyond each knee

Every coefficient is at least zero. Matrix products cost little more than reading the weights up to a knee, and grow in
a line behind it; the knees are fixed places where the slope may rise, so that the sum can take that shape on any
device. Knows numbers only; nothing of requests, blocks or clocks.
"""

import math
from collections.abc import Sequence
from operator import mul

import msgspec

from penstock.engine.metrics import QuantileWindow
from penstock.engine.scheduler.machine_change import ChangeWatch, MachineChange, PastStep

KNEES = (0, 64, 128, 256, 512)

# Steps, and steps with prompts among them, after which a prediction may decide about a request.
TRUSTED_STEPS = 16
TRUSTED_PROMPT_STEPS = 3

# A step that takes this part more is no longer for anybody's purpose; beyond so many tokens every one has its price.
_HARDLY = 0.05
_MANY_TOKENS = KNEES[-1]

# Each step weighs this much less than the one after it: about 500 steps are remembered.
_MEMORY = 0.998
# What is left of the weight of all steps from before the machine became another.
_MEMORY_OF_ANOTHER = 0.05
# A step that took less than this part of what was expected counts the less, the further it is off: behind a stall of
# the host a step seems to take no time at all. One that took too long needs no such rule: in parts of its own duration
# its error is never over one.
_TOO_SHORT = 0.67
_TOO_SHORT_AFTER_STEPS = 50
# Keeps a coefficient where it was while nothing that runs tells anything about it. Less where steps take longer than
# this many milliseconds, since each of them weighs less.
_INERTIA = 1e-4
_INERTIA_MILLISECONDS = 50.0
_ERROR_WINDOW = 200
_SOLVE_EVERY = 8
_SWEEPS = 12
_FIRST_SWEEPS = 60

# The features' sizes that make their coefficients alike: all are some units on most devices.
_UNITS = (1e-3, 1e-3, 1e-9, 1e-5, 1e-8, *(1e-5 for _ in KNEES))


class StepShape(msgspec.Struct, frozen=True, gc=False):
    """What a step runs, as far as its duration depends on it."""

    num_rows: int = 0  # requests that run one token
    context_tokens: int = 0  # tokens that these read
    prompt_tokens: int = 0  # tokens of all others
    prompt_pairs: int = 0  # sum over these of the tokens that each reads

    @property
    def num_tokens(self) -> int:
        return self.num_rows + self.prompt_tokens


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The coefficients: what a planner needs to know of a device and a model. All in seconds."""

    fixed: float
    prompt_step: float  # once, in a step that runs prompt tokens
    prompt_pair: float
    row: float
    context_token: float
    tokens_beyond: tuple[tuple[int, float], ...]  # (knee, seconds for each of the step's tokens behind it)

    def seconds(self, shape: StepShape) -> float:
        """How long a step of this shape takes."""
        total = self.fixed + self.row * shape.num_rows + self.context_token * shape.context_tokens
        if shape.prompt_tokens:
            total += self.prompt_step + self.prompt_pair * shape.prompt_pairs
        num_tokens = shape.num_rows + shape.prompt_tokens
        for knee, each in self.tokens_beyond:
            if num_tokens > knee:
                total += each * (num_tokens - knee)
        return total

    def prompt_tokens_within(self, seconds: float, shape: StepShape, context: int, most: int) -> int:
        """How many prompt tokens, `context` behind the start of theirs, fit beside `shape` into a step so long.

        Or, the first of a step, into one that is hardly longer where they are cheap: up to a knee they cost next to
        nothing, and a moment that is missing, since their context is long, would take many of them.
        """
        fitting = self._most_within(seconds, shape, context, most)
        if shape.prompt_tokens or fitting == most or fitting >= _MANY_TOKENS:
            return fitting
        more = self._most_within(seconds * (1.0 + _HARDLY), shape, context, most)
        return more if more >= fitting * (1.0 + 2.0 * _HARDLY) else fitting

    def _most_within(self, seconds: float, shape: StepShape, context: int, most: int) -> int:
        # What `seconds` says of `with_prompt`, without making a shape of each size that is tried: there are dozens of
        # them for every request that comes.
        each_pair, knees = self.prompt_pair, self.tokens_beyond
        least = self.fixed + self.row * shape.num_rows + self.context_token * shape.context_tokens
        num_others, num_pairs = shape.num_rows + shape.prompt_tokens, shape.prompt_pairs
        low, high = 0, max(0, most)
        while low < high:
            middle = (low + high + 1) // 2
            pairs = num_pairs + middle * context + middle * (middle + 1) // 2
            total = least + (self.prompt_step + each_pair * pairs)
            for knee, each in knees:
                if num_others + middle > knee:
                    total += each * (num_others + middle - knee)
            if total <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    @property
    def token_seconds(self) -> float:
        """What a prompt token costs in a large step."""
        return sum(each for _, each in self.tokens_beyond)


def with_prompt(shape: StepShape, num_tokens: int, context: int) -> StepShape:
    """Return the shape with so many prompt tokens more, the first of which has `context` tokens before it."""
    pairs = num_tokens * context + num_tokens * (num_tokens + 1) // 2
    return StepShape(shape.num_rows, shape.context_tokens, shape.prompt_tokens + num_tokens, shape.prompt_pairs + pairs)


# Before anything has run: a small model on a middling device.
FIRST_GUESS = StepCosts(
    fixed=5e-3, prompt_step=5e-4, prompt_pair=1e-9, row=1e-5, context_token=5e-8, tokens_beyond=((0, 0.0), (256, 5e-5))
)


class CostModel:
    """Fits the coefficients to relative errors by least squares, none below zero, old steps forgotten."""

    def __init__(self, known: StepCosts | None = None) -> None:
        self._coefficients = _to_vector(known if known is not None else FIRST_GUESS)
        size = len(self._coefficients)
        self._gram = [[0.0] * size for _ in range(size)]
        self._target = [0.0] * size
        self._num_steps = 0
        self._num_prompt_steps = 0
        self._is_known = known is not None
        self._errors = QuantileWindow(_ERROR_WINDOW)
        self._watch = ChangeWatch()
        self.costs = _to_costs(self._coefficients)

    @property
    def is_trusted(self) -> bool:
        """Whether enough has been seen, or was told, to refuse work by it."""
        seen = self._num_steps >= TRUSTED_STEPS and self._num_prompt_steps >= TRUSTED_PROMPT_STEPS
        return self._is_known or seen

    @property
    def median_error(self) -> float | None:
        """The median of |predicted - actual| / actual over the last steps, each predicted before it was learnt from."""
        return self._errors.median

    def seconds(self, shape: StepShape) -> float:
        return self.costs.seconds(shape)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from a step that ran."""
        if seconds <= 0.0 or not math.isfinite(seconds):
            return
        expected = self.seconds(shape)
        self._errors.add(abs(expected - seconds) / seconds)
        self._num_steps += 1
        self._num_prompt_steps += shape.prompt_tokens > 0
        step = PastStep(self._num_steps, _features(shape), seconds, seconds / max(expected, 1e-9))
        self._learn(step.features, seconds, self._weight(step.ratio))
        if self._num_steps <= TRUSTED_STEPS:
            self._solve(_FIRST_SWEEPS)
            return
        change = self._watch.add(step, has_prompts=shape.prompt_tokens > 0)
        if change is not None:
            self._learn_anew(change)
        elif self._num_steps % _SOLVE_EVERY == 0:
            self._solve(_SWEEPS)

    def _weight(self, ratio: float) -> float:
        if self._num_steps <= _TOO_SHORT_AFTER_STEPS and not self._is_known:
            # What was expected may be far off itself: the error counts in parts of the longer of the two.
            return min(1.0, ratio**2)
        return min(1.0, (ratio / _TOO_SHORT) ** 4)

    def _learn_anew(self, change: MachineChange) -> None:
        """Take all that is known for so many times as long, hold it lightly, and learn again from the steps since."""
        ratio = change.ratio
        self._coefficients = [value * ratio for value in self._coefficients]
        self._gram = [[value * _MEMORY_OF_ANOTHER / ratio**2 for value in row] for row in self._gram]
        self._target = [value * _MEMORY_OF_ANOTHER / ratio for value in self._target]
        for step in change.steps:
            self._learn(step.features, step.seconds, self._weight(step.ratio / ratio))
        self._solve(_FIRST_SWEEPS)

    def _learn(self, features: Sequence[float], seconds: float, weight: float) -> None:
        # Divided by the duration: short steps count as much as long ones, since errors are judged in parts of it.
        scaled = [(index, feature / seconds) for index, feature in enumerate(features) if feature]
        for row in self._gram:
            row[:] = [value * _MEMORY for value in row]
        self._target = [value * _MEMORY for value in self._target]
        for index, value in scaled:
            row, part = self._gram[index], weight * value
            for other, other_value in scaled:
                row[other] += part * other_value
            self._target[index] += part

    def _solve(self, sweeps: int) -> None:
        """Descend along one coefficient after another, never below zero, from where the last solution was."""
        if not self._gram[0][0]:
            return  # no step has counted for anything yet
        values = self._coefficients
        anchors = list(values)
        milliseconds = self._target[0] / self._gram[0][0]  # what the steps took, on the mean
        inertia = _INERTIA * min(1.0, _INERTIA_MILLISECONDS / milliseconds) ** 2
        for _ in range(sweeps):
            for index, row in enumerate(self._gram):
                own = row[index]
                rest = sum(map(mul, row, values)) - own * values[index]
                wanted = self._target[index] - rest + inertia * anchors[index]
                values[index] = max(0.0, wanted / (own + inertia))
        self.costs = _to_costs(values)


def _features(shape: StepShape) -> list[float]:
    num_tokens = shape.num_tokens
    plain = (1.0, float(shape.prompt_tokens > 0), shape.prompt_pairs, shape.num_rows, shape.context_tokens)
    raw = (*plain, *(max(0, num_tokens - knee) for knee in KNEES))
    return [value * unit for value, unit in zip(raw, _UNITS, strict=True)]


def _to_costs(coefficients: Sequence[float]) -> StepCosts:
    scaled = [value * unit for value, unit in zip(coefficients, _UNITS, strict=True)]
    return StepCosts(
        fixed=scaled[0],
        prompt_step=scaled[1],
        prompt_pair=scaled[2],
        row=scaled[3],
        context_token=scaled[4],
        tokens_beyond=tuple((knee, each) for knee, each in zip(KNEES, scaled[5:], strict=True) if each > 0.0),
    )


def _to_vector(costs: StepCosts) -> list[float]:
    """The coefficients in our units; what lies behind a knee that is not ours counts for the nearest that is."""
    beyond = [0.0] * len(KNEES)
    for knee, each in costs.tokens_beyond:
        nearest = min(range(len(KNEES)), key=lambda index: abs(KNEES[index] - knee))
        beyond[nearest] += each
    plain = (costs.fixed, costs.prompt_step, costs.prompt_pair, costs.row, costs.context_token)
    return [value / unit for value, unit in zip((*plain, *beyond), _UNITS, strict=True)]
