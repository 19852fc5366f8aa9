"""Guesses by looking back: what followed the last few tokens when they stood here before.

Costs no model and pays where answers repeat their prompt (summaries, code edits, extraction).
"""

from array import array
from collections.abc import Sequence

from penstock.engine.speculative.interface import Drafter

_ITEM_BYTES = array("I").itemsize


class NgramDrafter(Drafter):
    """Finds the latest earlier occurrence of the longest matching tail of 4 down to 2 tokens."""

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self._longest = longest
        self._shortest = shortest

    def propose(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        packed = array("I", tokens).tobytes()
        for length in range(min(self._longest, len(tokens) - 1), self._shortest - 1, -1):
            start = self._find_before(packed, packed[-length * _ITEM_BYTES :])
            if start is not None:
                return list(tokens[start + length : start + length + max_drafts])
        return []

    @staticmethod
    def _find_before(packed: bytes, tail: bytes) -> int | None:
        """Return the token index of the latest occurrence of `tail` before the end."""
        end = len(packed) - _ITEM_BYTES
        while (found := packed.rfind(tail, 0, end)) >= 0:
            if found % _ITEM_BYTES == 0:
                return found // _ITEM_BYTES
            end = found + len(tail) - 1
        return None
