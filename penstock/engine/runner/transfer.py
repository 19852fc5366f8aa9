"""Small arrays between host and device, without waiting for either. On a CPU nothing is copied."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

# More than the steps that can be under way: a slot is free again before it is wanted.
_NUM_SLOTS = 4


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Return the array as a tensor on the device; the copy runs in stream order."""
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Return a host tensor that holds the values once the stream has got this far."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


@dataclass(slots=True)
class StagingSlot:
    """Pinned memory, as an array to fill and as the tensor to copy from."""

    tensor: Tensor  # [n] int64
    values: np.ndarray  # the same memory
    copied: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class StagingRing:
    """Pinned memory used in turn, so that a copy never reads what a later step has written."""

    def __init__(self, size: int) -> None:
        """`size`: how many int64 a slot holds."""
        tensors = [torch.zeros(size, dtype=torch.int64, pin_memory=True) for _ in range(_NUM_SLOTS)]
        self._slots = [StagingSlot(tensor, tensor.numpy()) for tensor in tensors]
        self._next = 0

    @contextmanager
    def slot(self) -> Iterator[StagingSlot]:
        """Lend the next slot: fill it and queue its copy inside the block."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % _NUM_SLOTS
        slot.copied.synchronize()
        yield slot
        slot.copied.record()
