"""The fixed set of KV blocks: who holds each, and in which order free ones are reused.

Knows block numbers, reference counts and names. Knows nothing of tensors, tokens or requests. Every operation is O(1).
"""

from penstock.block_hash import BlockHash

# Block 0 belongs to nobody: padded rows of a captured graph read and write it.
SCRATCH_BLOCK = 0


class BlockPool:
    """Blocks with reference counts, an index by name, and an intrusive list of free ones.

    A block is held (count > 0) or in the free list. A free block keeps its name, and so can be revived by `hold`,
    until `take` hands it to a new owner. Unnamed blocks are taken first, then the least recently released.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "one scratch block and at least one to use"
        self.num_blocks = num_blocks - 1
        self.num_free = 0
        self._counts = [0] * num_blocks
        self._names: list[BlockHash | None] = [None] * num_blocks
        self._index: dict[BlockHash, int] = {}
        # A circular doubly linked list through the scratch block, which is never free itself.
        self._next = [0] * num_blocks
        self._previous = [0] * num_blocks
        for block in range(1, num_blocks):
            self._link_before(block, SCRATCH_BLOCK)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_named(self) -> int:
        return len(self._index)

    def names(self) -> list[BlockHash]:
        """Return every name there is."""
        return list(self._index)

    def find(self, name: BlockHash) -> int | None:
        """Return the block of this name, held or free. Changes nothing."""
        return self._index.get(name)

    def is_held(self, block: int) -> bool:
        return self._counts[block] > 0

    def take(self) -> tuple[int, BlockHash | None]:
        """Hand out a free block, held once; also return the name it loses, if it had one."""
        assert self.num_free > 0
        block = self._next[SCRATCH_BLOCK]
        self._unlink(block)
        self._counts[block] = 1
        return block, self.forget(block)

    def hold(self, block: int) -> None:
        """Add a holder; revives a free block."""
        if self._counts[block] == 0:
            self._unlink(block)
        self._counts[block] += 1

    def release(self, block: int) -> None:
        """Drop a holder. The last one frees the block, which stays findable by its name."""
        assert self._counts[block] > 0, f"block {block} released more often than held"
        self._counts[block] -= 1
        if self._counts[block] == 0:
            named = self._names[block] is not None
            self._link_before(block, SCRATCH_BLOCK if named else self._next[SCRATCH_BLOCK])

    def give_name(self, block: int, name: BlockHash) -> bool:
        """Make a held, full block findable. False if another block has that name; the first one keeps it."""
        assert self._counts[block] > 0
        if name in self._index:
            return self._index[name] == block
        assert self._names[block] is None
        self._names[block] = name
        self._index[name] = block
        return True

    def forget(self, block: int) -> BlockHash | None:
        """Take a block's name away, so that nobody finds it; return the name, if it had one."""
        name = self._names[block]
        if name is not None:
            del self._index[name]
            self._names[block] = None
        return name

    def forget_all(self) -> list[int]:
        """Take every name away; return the blocks that had one."""
        named = list(self._index.values())
        for block in named:
            self.forget(block)
        return named

    def _link_before(self, block: int, successor: int) -> None:
        predecessor = self._previous[successor]
        self._next[predecessor] = block
        self._previous[block] = predecessor
        self._next[block] = successor
        self._previous[successor] = block
        self.num_free += 1

    def _unlink(self, block: int) -> None:
        predecessor, successor = self._previous[block], self._next[block]
        self._next[predecessor] = successor
        self._previous[successor] = predecessor
        self.num_free -= 1
