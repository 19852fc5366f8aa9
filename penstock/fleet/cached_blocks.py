"""The blocks that one replica says it has cached: a snapshot, and every change since.

Changes are numbered; a gap means that something was missed, and only another snapshot helps. Knows nothing of how they
come here.
"""

from penstock.protocol.block_events import BlockChanges, BlockSnapshot, unpack

MAX_NAMES = 4_000_000  # of one replica; a gateway must not run out of memory for its sake


class BlocksMissed(Exception):
    """Changes are missing, or there are too many blocks: ask for a snapshot, or do without."""


class CachedBlocks:
    """Short names of blocks. `in` asks for one."""

    def __init__(self, snapshot: BlockSnapshot) -> None:
        self._names = set(unpack(snapshot.names))
        self._number = snapshot.number
        self.block_tokens = snapshot.block_tokens
        self._check_size()

    def __contains__(self, name: int) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def apply(self, changes: BlockChanges) -> None:
        """Take the next changes in. Raises BlocksMissed."""
        if changes.number != self._number + 1:
            raise BlocksMissed(f"changes {changes.number} came after {self._number}")
        self._number = changes.number
        if changes.cleared:
            self._names.clear()
        self._names.update(unpack(changes.stored))
        self._names.difference_update(unpack(changes.removed))
        self._check_size()

    def _check_size(self) -> None:
        if len(self._names) > MAX_NAMES:
            raise BlocksMissed(f"it has more than {MAX_NAMES} blocks")
