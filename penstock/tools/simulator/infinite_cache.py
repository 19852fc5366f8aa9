"""What one cache without a limit, shared by the whole fleet, would have found of each prompt: the most there is.

Knows nothing of time: a prompt is there for the next one as soon as it was seen.
"""

from collections.abc import Sequence

from penstock.block_hash import BlockHasher


class InfiniteCache:
    def __init__(self, block_tokens: int) -> None:
        self._hasher = BlockHasher(b"", block_tokens)
        self._salt = self._hasher.salt()
        self._names: set[bytes] = set()
        self.hit_tokens = 0

    def see(self, tokens: Sequence[int]) -> None:
        """Count what was there of a prompt, and keep it."""
        names = self._hasher.chain(self._salt, tokens)
        # As in an engine, one token is always computed.
        usable = (len(tokens) - 1) // self._hasher.block_tokens
        for index, name in enumerate(names):
            if name not in self._names:
                usable = min(usable, index)
                break
        self.hit_tokens += usable * self._hasher.block_tokens
        self._names.update(names)
