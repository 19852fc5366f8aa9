"""What has become findable in the cache, what has left the device for the host, and what is gone since a last look.

Of a block that came and went in between, only how it ended is told. Knows names; nothing of blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from penstock.block_hash import BlockHash


class Whereabouts(Enum):
    DEVICE = "device"
    HOST = "host"  # alone: it must be copied before it can be read
    NOWHERE = "nowhere"


@dataclass(slots=True)
class BlockLog:
    has_cleared: bool = False  # everything, before what is in `ends`
    ends: dict[BlockHash, Whereabouts] = field(default_factory=dict)  # where each block that moved is now

    @property
    def is_empty(self) -> bool:
        return not self.ends and not self.has_cleared

    def note(self, name: BlockHash, where: Whereabouts) -> None:
        self.ends[name] = where

    def clear(self) -> None:
        self.ends.clear()
        self.has_cleared = True

    def names(self, where: Whereabouts) -> Iterator[BlockHash]:
        """Give what is there now and was not, or not only, before."""
        return (name for name, end in self.ends.items() if end is where)
