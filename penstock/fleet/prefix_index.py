"""Which beginnings of prompts one replica has cached, as far as a gateway can know.

What the replica was sent it has, until it must have been evicted: no more is remembered than fits its cache, and the
least recently used goes first. Where the replica tells of its blocks (`fleet.cached_blocks`), they decide instead.
Knows prefix hashes and block names; nothing of requests, text or time.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from penstock.fleet.cached_blocks import CachedBlocks
from penstock.protocol.prompt_note import PromptNote


class CachedPieces(NamedTuple):
    """How many leading pieces of a prompt a replica has."""

    num_cached: int
    num_on_host: int = 0  # of these, how many it must copy to its device first


class PrefixIndex:
    """Hashes of beginnings, each one piece longer than the one before (`RouteQuery.prefix_hashes`)."""

    def __init__(self, max_pieces: int) -> None:
        self.max_pieces = max_pieces
        self._names: OrderedDict[bytes, int | None] = OrderedDict()  # the block that ends the piece, once it is known

    def __len__(self) -> int:
        return len(self._names)

    def count_cached(self, hashes: Sequence[bytes], blocks: CachedBlocks | None) -> CachedPieces:
        """Count the leading pieces that are cached. `blocks`: what the replica tells itself, where it does."""
        names = self._names
        num_on_host = 0
        for index, piece in enumerate(hashes):
            if piece not in names:
                return CachedPieces(index, num_on_host)
            name = names[piece]
            if blocks is not None and name is not None:
                if name not in blocks:
                    return CachedPieces(index, num_on_host)
                num_on_host += blocks.is_on_host(name)
        return CachedPieces(len(hashes), num_on_host)

    def remember(self, hashes: Sequence[bytes]) -> None:
        """Take that the replica was sent a prompt."""
        names = self._names
        # Heads last, so that tails go first: a beginning without its head is found by nobody.
        for piece in reversed(hashes):
            names[piece] = names.pop(piece, None)
        self._shrink()

    def learn(self, hashes: Sequence[bytes], note: PromptNote) -> None:
        """Take the names of a prompt's blocks, as the replica told them in its answer."""
        if not hashes:
            return
        # Text has no exact places: the tokens of each piece are taken to be alike many.
        tokens_per_piece = note.num_tokens / len(hashes)
        for index, piece in enumerate(hashes):
            if piece in self._names:
                self._names[piece] = note.name_at((index + 1) * tokens_per_piece)

    def _shrink(self) -> None:
        while len(self._names) > self.max_pieces:
            self._names.popitem(last=False)
