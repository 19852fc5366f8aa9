"""A table from names to things that live in modules not yet imported.

Each family of interchangeable parts (models, weight formats, attention backends, drafters) has one. Listing names
imports nothing; `load` imports the one module it needs.
"""

from importlib import import_module
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class Registry(Generic[T]):
    """Names mapped to "module:attribute"."""

    def __init__(self, kind: str, members: dict[str, str]) -> None:
        self.kind = kind
        self._members = dict(members)

    @property
    def names(self) -> list[str]:
        return list(self._members)

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def load(self, name: str) -> T:
        """Import and return a member. Raises KeyError, which names what exists."""
        if name not in self._members:
            raise KeyError(f"no {self.kind} named {name!r}; there are: {', '.join(self._members)}")
        module, _, attribute = self._members[name].partition(":")
        return cast(T, getattr(import_module(module), attribute))
