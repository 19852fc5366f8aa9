"""Whether a machine has become another: slower or faster than what was learnt of it, and not for a moment only.

Looks at the last steps' times in parts of what was expected of them. A few that are far off are hiccups; most of them
off to one side are a change. Steps with prompts and steps without are judged apart, since one kind may change alone.
Knows ratios and features; nothing of what is fitted to them.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

import msgspec

# Of the last so many steps of a kind this many took over so many times what was expected (or so much less).
_WINDOW_STEPS = 24
_ENOUGH_STEPS = 15
_FAR_OFF = 1.2


class PastStep(msgspec.Struct, frozen=True, gc=False):
    """A step that ran."""

    number: int
    features: Sequence[float]
    seconds: float
    ratio: float  # what it took, in parts of what was expected


class MachineChange(msgspec.Struct, frozen=True):
    """A machine that has become another."""

    ratio: float  # what steps take now, in parts of what they took
    steps: list[PastStep]  # those that ran since


class ChangeWatch:
    """Follows the steps and says when the machine is no longer what it was."""

    def __init__(self) -> None:
        self._answer_steps: deque[PastStep] = deque(maxlen=_WINDOW_STEPS)
        self._prompt_steps: deque[PastStep] = deque(maxlen=_WINDOW_STEPS)

    def add(self, step: PastStep, *, has_prompts: bool) -> MachineChange | None:
        """Return the change that this step makes certain, where it does: then what was seen before is forgotten."""
        kind = self._prompt_steps if has_prompts else self._answer_steps
        kind.append(step)
        if 1.0 / _FAR_OFF <= step.ratio <= _FAR_OFF:
            return None  # only one that is far off itself can be the last that was missing
        is_slower = step.ratio > 1.0
        off = [past for past in kind if (past.ratio > _FAR_OFF if is_slower else past.ratio < 1.0 / _FAR_OFF)]
        if len(off) < _ENOUGH_STEPS:
            return None
        since = [past for past in (*self._answer_steps, *self._prompt_steps) if past.number >= off[0].number]
        self._answer_steps.clear()
        self._prompt_steps.clear()
        return MachineChange(median(past.ratio for past in off), since)
