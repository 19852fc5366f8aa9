"""The KV cache's memory, on the device and in the host tier.

Moves blocks between them; knows nothing of their owners.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.engine.runner.transfer import to_device
from penstock.engine.scheduler.step_plan import TierCopy
from penstock.models.spec import ModelSpec


class KvPool:
    """One tensor per layer: [2, blocks, block_tokens, kv_heads, head_dim], keys then values."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_blocks: int,
        num_host_slots: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        inner = (block_tokens, spec.num_kv_heads, spec.head_dim)
        self.layers = [_zeros((2, num_blocks, *inner), dtype, device) for _ in range(spec.num_layers)]
        self._host: Tensor | None = None
        if num_host_slots:
            pinned = device.type == "cuda"
            self._host = torch.empty(num_host_slots, spec.num_layers, 2, *inner, dtype=dtype, pin_memory=pinned)

    def copy(self, copies: Sequence[TierCopy]) -> None:
        """Move blocks between device and host, in order."""
        for item in copies:
            assert self._host is not None
            host_block = self._host[item.host_slot]
            for layer, pool in enumerate(self.layers):
                if item.to_host:
                    host_block[layer].copy_(pool[:, item.block], non_blocking=True)
                else:
                    pool[:, item.block].copy_(host_block[layer], non_blocking=True)

    def wipe(self, blocks: Sequence[int]) -> None:
        """Fill blocks with zeros."""
        if blocks:
            index = to_device(np.array(blocks, np.int64), self.layers[0].device)
            for pool in self.layers:
                pool.index_fill_(1, index, 0)

    @property
    def block_bytes(self) -> int:
        """Size of one block over all layers."""
        return sum(pool[:, 0].numel() * pool.element_size() for pool in self.layers)

    def read(self, block: int) -> bytes:
        """Return one block of all layers. Waits for the device."""
        parts = torch.stack([pool[:, block] for pool in self.layers])
        return parts.cpu().contiguous().view(torch.uint8).numpy().tobytes()

    def write(self, block: int, content: bytes) -> None:
        """Fill one block of all layers with what `read` gave elsewhere."""
        assert len(content) == self.block_bytes
        first = self.layers[0]
        parts = torch.frombuffer(bytearray(content), dtype=first.dtype).view(len(self.layers), *first[:, 0].shape)
        for pool, part in zip(self.layers, parts, strict=True):
            pool[:, block].copy_(part)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeroed memory. On a CPU the system hands out zero pages at first use; filling them would take seconds."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)
