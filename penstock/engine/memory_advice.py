"""Which option, and which value of it, would make a model fit that does not.

Asks what changed options would come to; knows nothing of how that is found. No torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.config import Options, flag, parse_bytes

LEAST_CONTEXT = 16  # tokens that are worth serving
USUAL_CONTEXT = 2048  # tokens that are worth a change of options, where no context was asked for

Changes = dict[str, Any]  # values of options, by name
Fits = Callable[[Changes], bool]


@dataclass(frozen=True, slots=True)
class Present:
    """What the options come to that do not fit."""

    max_context_tokens: int
    max_running: int
    max_step_tokens: int
    block_bytes: int
    usual_running: int  # without options
    usual_step_tokens: int
    small_precision: str  # the one whose weights are smallest here
    spare_bytes: int  # to leave free where there is a choice: free memory comes and goes


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number from `low` that fits, and is below `high`. None: not even the lowest does."""
    if low >= high or not fits(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


class Adviser:
    """Looks for changes of options with which a model fits."""

    def __init__(self, options: Options, present: Present, context_with: Callable[[Changes, int], int]) -> None:
        """`context_with` says how long a request may be with such changes and less memory; 0: they do not fit."""
        self._options = options
        self._present = present
        self._context_with = context_with

    def find(self) -> Changes | None:
        """The one change that is enough, or several where one is not; None: nothing helps."""
        for look in (self._one, self._several):
            for wanted in (USUAL_CONTEXT, LEAST_CONTEXT):
                context = min(wanted, self._present.max_context_tokens)
                for spare_bytes in (self._present.spare_bytes, 0):
                    changes = look(context, partial(self._fits, context, spare_bytes))
                    if changes is not None:
                        return changes
        return None

    def _fits(self, context: int, spare_bytes: int, changes: Changes) -> bool:
        return self._context_with(changes, spare_bytes) >= context

    def _one(self, context: int, fits: Fits) -> Changes | None:
        for option in self._in_order():
            value = self._value(option, context, fits)
            if value is not None:
                return {option: value}
        return None

    def _in_order(self) -> list[str]:
        """Another size of KV costs nothing else; then what was asked for goes before what was chosen."""
        names = ("max_step_tokens", "max_context_tokens", "max_running")
        return ["kv_memory", *sorted(names, key=lambda name: not self._is_given(name)), "precision"]

    def _is_given(self, option: str) -> bool:
        return getattr(self._options, option) is not None

    def _value(self, option: str, context: int, fits: Fits) -> Any:
        """The value of an option with which requests of such a context fit, the others as they are."""
        present = self._present

        def does(value: Any) -> bool:
            return fits({option: value})

        if option == "precision":
            small = present.small_precision
            return small if small != self._options.precision and does(small) else None
        if option == "kv_memory":
            return self._kv_memory(context, does)
        if option == "max_step_tokens":
            return largest(self._options.max_running or 1, present.max_step_tokens, does)
        if option == "max_running":
            return largest(1, present.max_running, does)
        return largest(context, present.max_context_tokens, does)

    def _kv_memory(self, context: int, does: Callable[[str], bool]) -> str | None:
        given = self._options.kv_memory
        least = self._kv_bytes(max(context, self._options.max_context_tokens or 0))
        if given is None or parse_bytes("--kv-memory", given) <= least:
            return next(filter(does, (_show_bytes(least, at_least=True), str(least))), None)
        most = largest(least, parse_bytes("--kv-memory", given), lambda count: does(str(count)))
        return None if most is None else next(filter(does, (_show_bytes(most), str(most))))

    def _kv_bytes(self, context: int) -> int:
        return -(-context // self._options.block_tokens) * self._present.block_bytes

    def _several(self, context: int, fits: Fits) -> Changes | None:
        """What was asked for becomes what is usual, or less where that is too much; no more changes than it takes."""
        options, present = self._options, self._present
        usual = {
            "max_context_tokens": context,
            "kv_memory": str(self._kv_bytes(context)),
            "max_running": min(present.usual_running, options.max_running or present.usual_running),
        }
        given = {name: value for name, value in usual.items() if self._is_given(name)}
        for precision in ({}, {"precision": present.small_precision}):
            for changes in (given, usual):
                found = self._with_small_steps({**precision, **changes}, fits)
                if found is not None:
                    return _fewest(found, fits)
        return None

    def _with_small_steps(self, changes: Changes, fits: Fits) -> Changes | None:
        """The changes beside the largest steps that fit, and fewer requests where none do."""
        running = changes.get("max_running", 1)
        most = max(running, self._present.usual_step_tokens)
        number = largest(running, most + 1, lambda number: fits({**changes, "max_step_tokens": number}))
        if number is not None:
            return {**changes, "max_step_tokens": number}
        number = largest(1, running, lambda number: fits({**changes, **_requests(number)}))
        return None if number is None else {**changes, **_requests(number)}


def _fewest(changes: Changes, fits: Fits) -> Changes:
    """The changes without those that others make needless."""
    for name in list(changes):
        fewer = {other: value for other, value in changes.items() if other != name}
        if fits(fewer):
            changes = fewer
    return changes


def _requests(number: int) -> Changes:
    """Steps of so many requests with a token each."""
    return {"max_running": number, "max_step_tokens": number}


def show(changes: Changes, options: Options) -> str:
    """The changes as a sentence tells them. The first option's name is told by whoever refuses it."""
    (first, value), *others = changes.items()
    text = f"give {value}"
    if first == "precision":
        text = f"give --precision {value}"
    elif not others:
        text += " or more" if first == "kv_memory" and _is_more(value, options.kv_memory) else " or less"
    return text + "".join(f", and {flag(name)} {value}" for name, value in others)


def _is_more(kv_memory: str, than: str | None) -> bool:
    return than is None or parse_bytes("--kv-memory", kv_memory) > parse_bytes("--kv-memory", than)


def _show_bytes(count: int, *, at_least: bool = False) -> str:
    """A number of bytes as an option takes it, rounded to what still fits, or to what is enough."""
    if count < 64 * 2**20:  # a whole MiB may be more than there is
        return str(max(0, count))
    return f"{-(-count // 2**20) if at_least else count // 2**20}MiB"
