"""Which evicted blocks the host's memory keeps, and in which slot.

The bytes themselves move in the runner, by the `TierCopy`s of a plan. Knows names and slots; nothing of tensors.
"""

from collections import OrderedDict
from collections.abc import Callable

from penstock.block_hash import BlockHash


class HostTier:
    """A bounded, least-recently-used map from block names to host slots."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.on_loss: Callable[[BlockHash], None] | None = None  # told each name that is no longer here
        self._slots: OrderedDict[BlockHash, int] = OrderedDict()
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_used(self) -> int:
        return len(self._slots)

    def names(self) -> list[BlockHash]:
        """Return every name there is."""
        return list(self._slots)

    def find(self, name: BlockHash) -> int | None:
        """Return the slot that keeps this block. Changes nothing."""
        return self._slots.get(name)

    def touch(self, name: BlockHash) -> None:
        """Count a hit: the block is now the most recently used."""
        self._slots.move_to_end(name)

    def admit(self, name: BlockHash) -> int | None:
        """Choose a slot for a block about to be evicted from the device. None if the tier has it already."""
        if name in self._slots:
            self._slots.move_to_end(name)
            return None
        slot = self._free.pop() if self._free else self._make_room()
        self._slots[name] = slot
        return slot

    def drop_slot(self, slot: int) -> None:
        """Forget the block of a slot whose contents cannot be trusted. O(slots): for failures only."""
        for name, used in self._slots.items():
            if used == slot:
                del self._slots[name]
                self._free.append(slot)
                self._tell_loss(name)
                return

    def clear(self) -> None:
        """Forget every block."""
        self._free += self._slots.values()
        self._slots.clear()

    def _make_room(self) -> int:
        name, slot = self._slots.popitem(last=False)
        self._tell_loss(name)
        return slot

    def _tell_loss(self, name: BlockHash) -> None:
        if self.on_loss is not None:
            self.on_loss(name)
