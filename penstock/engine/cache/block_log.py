"""What has become findable in the cache, and what no longer is, since somebody last looked.

Of a block that came and went in between, only how it ended is told. Knows names; nothing of blocks or tiers.
"""

from dataclasses import dataclass, field

from penstock.block_hash import BlockHash


@dataclass(slots=True)
class BlockLog:
    has_cleared: bool = False  # everything, before what is in `is_stored`
    is_stored: dict[BlockHash, bool] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not self.is_stored and not self.has_cleared

    def store(self, name: BlockHash) -> None:
        self.is_stored[name] = True

    def remove(self, name: BlockHash) -> None:
        self.is_stored[name] = False

    def clear(self) -> None:
        self.is_stored.clear()
        self.has_cleared = True
