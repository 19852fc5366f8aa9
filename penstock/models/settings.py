"""A model's settings with typed access: every refusal names the file, the key and the value.

Serves `config.json` and GGUF metadata alike. Knows no family and no torch.
"""

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from penstock.errors import ModelError

T = TypeVar("T")

_MAX_INTEGER = 2**31 - 1


class Settings:
    """Keys and values of one file. A key given as null counts as not given."""

    def __init__(self, values: Mapping[str, object], file: str, *, prefix: str = "") -> None:
        self.values = values
        self.file = file
        self.prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self.values.get(self.prefix + key) is not None

    def is_given(self, key: str) -> bool:
        """Whether the key is there, be it as null: some families mean "none" by null and a default by absence."""
        return self.prefix + key in self.values

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = _MAX_INTEGER) -> int:
        return self._required(key, self.optional_integer(key, low=low, high=high), default)

    def optional_integer(self, key: str, *, low: int = 1, high: int = _MAX_INTEGER) -> int | None:
        def check(value: object) -> int | None:
            number = _finite(value)
            # Some writers save whole numbers as floats.
            return int(number) if number is not None and low <= number <= high and number == int(number) else None

        return self._optional(key, check, f"give an integer from {low} to {high}")

    def number(self, key: str, default: float | None = None) -> float:
        return self._required(key, self.optional_number(key), default)

    def optional_number(self, key: str) -> float | None:
        return self._optional(key, _finite, "give a finite number")

    def positive(self, key: str, default: float | None = None) -> float:
        def check(value: object) -> float | None:
            number = _finite(value)
            return number if number is not None and number > 0 else None

        return self._required(key, self._optional(key, check, "give a finite number over 0"), default)

    def flag(self, key: str, default: bool) -> bool:
        value = self._optional(key, lambda value: value if isinstance(value, bool) else None, "give true or false")
        return default if value is None else value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._optional(key, lambda value: value if isinstance(value, str) else None, "give a string")
        return self._required(key, value, default)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of numbers; empty when the key is absent."""
        return self._sequence(key, _finite, "give a list of finite numbers")

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a list of integers, or one integer as a list of one; empty when the key is absent."""

        def check(value: object) -> int | None:
            return value if isinstance(value, int) and not isinstance(value, bool) else None

        if isinstance(self.values.get(self.prefix + key), int):
            return (self.integer(key, low=0),)
        return self._sequence(key, check, "give a list of integers")

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Return the ids of tokens that the model must have, listed or a single one; empty when the key is absent."""
        ids = self.integers(key)
        if not all(0 <= token_id < vocab_size for token_id in ids):
            raise self.refusal(key, f"the model has tokens 0 to {vocab_size - 1} (vocab_size)")
        return ids

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings; empty when the key is absent."""
        return self._sequence(key, lambda item: item if isinstance(item, str) else None, "give a list of strings")

    def section(self, key: str) -> "Settings | None":
        """Return an object nested under `key`; None when there is none."""
        value = self.values.get(self.prefix + key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refusal(key, "give an object")
        return Settings(value, f"{self.file} ({self.prefix}{key})")

    def choice(self, key: str, choices: Mapping[str, T], default: str | None = None) -> T:
        """Return what `choices` holds for the key's value."""
        name = self.text(key, default)
        if name not in choices:
            raise self.refusal(key, f"supported are: {', '.join(choices)}")
        return choices[name]

    def refusal(self, key: str, right: str) -> ModelError:
        """The error for a key whose value cannot be used; the caller raises it."""
        shown = repr(self.values.get(self.prefix + key))
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return ModelError(f"{self.prefix}{key}: {shown} is not usable; {right}", file=self.file)

    def _required(self, key: str, value: T | None, default: T | None) -> T:
        if value is not None:
            return value
        if default is None:
            raise ModelError(f"{self.prefix}{key} is missing; the file must give it", file=self.file)
        return default

    def _optional(self, key: str, check: Callable[[object], T | None], right: str) -> T | None:
        value = self.values.get(self.prefix + key)
        if value is None:
            return None
        checked = check(value)
        if checked is None:
            raise self.refusal(key, right)
        return checked

    def _sequence(self, key: str, check: Callable[[object], T | None], right: str) -> tuple[T, ...]:
        value = self.values.get(self.prefix + key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            raise self.refusal(key, right)
        items = []
        for item in value:
            checked = check(item)
            if checked is None:
                raise self.refusal(key, right)
            items.append(checked)
        return tuple(items)


class GgufSettings(Settings):
    """A GGUF file's metadata under its architecture's prefix, and what its tensors tell about the model."""

    def __init__(
        self,
        metadata: Mapping[str, object],
        file: str,
        shapes: Mapping[str, tuple[int, ...]],
        vector: Callable[[str], tuple[float, ...]],
    ) -> None:
        super().__init__(metadata, file, prefix=f"{metadata.get('general.architecture')}.")
        self.shapes = shapes
        self.vector = vector  # the numbers of a small float32 tensor, by name
        self.tokenizer = Settings(metadata, file, prefix="tokenizer.ggml.")


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats
        return None
    return number if math.isfinite(number) else None
