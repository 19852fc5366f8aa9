"""The blocks that one replica says it has cached: a snapshot, and every change since.

Changes are numbered; a gap means that something was missed, and only another snapshot helps. Knows nothing of how they
come here.
"""

from penstock.protocol.block_events import BlockChanges, BlockSnapshot, unpack

MAX_NAMES = 4_000_000  # of one replica; a gateway must not run out of memory for its sake


class BlocksMissed(Exception):
    """Changes are missing, or there are too many blocks: ask for a snapshot, or do without."""


class CachedBlocks:
    """Short names of blocks, in whatever tier. `in` asks for one."""

    def __init__(self, snapshot: BlockSnapshot) -> None:
        self._names = set(unpack(snapshot.names))
        self._on_host = self._names.intersection(unpack(snapshot.on_host))
        self._number = snapshot.number
        self.block_tokens = snapshot.block_tokens
        self._check_size()

    def __contains__(self, name: int) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def is_on_host(self, name: int) -> bool:
        """Whether the replica must copy the block to its device before it can read it."""
        return name in self._on_host

    def apply(self, changes: BlockChanges) -> None:
        """Take the next changes in. Raises BlocksMissed."""
        if changes.number != self._number + 1:
            raise BlocksMissed(f"changes {changes.number} came after {self._number}")
        self._number = changes.number
        if changes.cleared:
            self._names.clear()
            self._on_host.clear()
        stored, removed, to_host = unpack(changes.stored), unpack(changes.removed), unpack(changes.to_host)
        self._names.update(stored, to_host)
        self._names.difference_update(removed)
        self._on_host.difference_update(stored, removed)
        self._on_host.update(to_host)
        self._check_size()

    def _check_size(self) -> None:
        if len(self._names) > MAX_NAMES:
            raise BlocksMissed(f"it has more than {MAX_NAMES} blocks")
