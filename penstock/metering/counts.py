"""What is counted of limits and of the store, for whoever shows metrics.

Knows nothing of how they are shown.
"""

from collections import Counter
from typing import Protocol


class StoreMetrics(Protocol):
    """Who is told."""

    def count_store_failure(self) -> None: ...
    def count_limit_refusal(self, limit: str) -> None: ...


class StoreCounts:
    """Plain counts of one process."""

    def __init__(self) -> None:
        self.num_store_failures = 0
        self.limit_refusals: Counter[str] = Counter()

    def count_store_failure(self) -> None:
        self.num_store_failures += 1

    def count_limit_refusal(self, limit: str) -> None:
        self.limit_refusals[limit] += 1
