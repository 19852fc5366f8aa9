"""How tokens are guessed. Verification is the runner's, and the same for every drafter."""

from abc import ABC, abstractmethod
from collections.abc import Sequence


class Drafter(ABC):
    """Guesses what comes next. A wrong guess costs time, never correctness."""

    @abstractmethod
    def propose(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        """Return up to `max_drafts` guesses for the tokens that follow; none is a fine answer."""
