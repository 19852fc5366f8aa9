"""Where rollouts are kept: what such a place can do, and one in memory for a gateway without a store.

Documents are text here, as they are in the store. Knows nothing of what they say.
"""

import threading
import time
from collections.abc import Callable
from typing import Protocol

# Given a model's document, what all gateways have seen in its epoch and the Unix time: the new document, or None.
Change = Callable[[str | None, list[str], float], str | None]


class RolloutBook(Protocol):
    """Every method may be called from any thread. Raises StoreUnavailable."""

    def read(self) -> list[str]:
        """Return every model's document."""

    def evidence(self, model: str, epoch: int) -> list[str]:
        """Return what all gateways have seen of a model in one epoch."""

    def change(self, model: str, epoch: int, change: Change, *, gateway: str = "", evidence: str = "") -> str | None:
        """Change a model's document while nobody else does, and return it as it then is.

        `evidence` is what a gateway has seen in the epoch; what was seen in others is forgotten.
        """

    def announce(self, gateway: str, document: str) -> None:
        """Take what a gateway serves; nothing where it stops."""

    def announced(self, seconds: float) -> list[str]:
        """Return what gateways that were heard of within so many seconds serve."""


class RolloutMemory:
    """A book that ends with its process."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._documents: dict[str, str] = {}
        self._evidence: dict[str, tuple[int, str]] = {}
        self._served = ""

    def read(self) -> list[str]:
        with self._lock:
            return list(self._documents.values())

    def evidence(self, model: str, epoch: int) -> list[str]:
        known_epoch, text = self._evidence.get(model, (epoch, ""))
        return [text] if text and known_epoch == epoch else []

    def change(self, model: str, epoch: int, change: Change, *, gateway: str = "", evidence: str = "") -> str | None:
        with self._lock:
            if evidence:
                self._evidence[model] = epoch, evidence
            changed = change(self._documents.get(model), self.evidence(model, epoch), self._clock())
            if changed is not None:
                self._documents[model] = changed
            return self._documents.get(model)

    def announce(self, gateway: str, document: str) -> None:
        self._served = document

    def announced(self, seconds: float) -> list[str]:
        return [self._served] if self._served else []  # its gateway is here for as long as it is
