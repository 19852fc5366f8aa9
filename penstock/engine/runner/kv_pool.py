"""The KV cache's memory, on the device and in the host tier.

Moves blocks between them; knows nothing of their owners.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.engine.runner.transfer import to_device
from penstock.engine.scheduler.step_plan import TierCopy
from penstock.models.spec import ModelSpec

# So many blocks are moved together, and no more bytes than these: one copy for each, not one for each layer of each.
_MOST_STAGED_BLOCKS, _MOST_STAGED_BYTES = 16, 64 << 20


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
        shape, is_pinned = (spec.num_layers, 2, *inner), device.type == "cuda" and num_host_slots > 0
        self._host = torch.empty(num_host_slots, *shape, dtype=dtype, pin_memory=is_pinned)
        # Blocks on their way, laid out as in the host's memory.
        num_staged = min(num_host_slots, _MOST_STAGED_BLOCKS, max(1, _MOST_STAGED_BYTES // self.block_bytes))
        self._staged = torch.empty(num_staged, *shape, dtype=dtype, device=device)

    def copy(self, copies: Sequence[TierCopy]) -> None:
        """Move blocks between device and host, in order."""
        for run in _runs(copies, len(self._staged)):
            blocks = to_device(np.array([item.block for item in run], np.int64), self._staged.device)
            staged = self._staged[: len(run)]
            if run[0].to_host:
                for layer, pool in enumerate(self.layers):
                    staged[:, layer] = pool.index_select(1, blocks).transpose(0, 1)
                for item, content in zip(run, staged, strict=True):
                    self._host[item.host_slot].copy_(content, non_blocking=True)
            else:
                for item, content in zip(run, staged, strict=True):
                    content.copy_(self._host[item.host_slot], non_blocking=True)
                for layer, pool in enumerate(self.layers):
                    pool.index_copy_(1, blocks, staged[:, layer].transpose(0, 1))

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


def _runs(copies: Sequence[TierCopy], most: int) -> Iterator[list[TierCopy]]:
    """Yield the copies in order, those together that go the same way and touch no block or slot twice."""
    run: list[TierCopy] = []
    touched: set[tuple[bool, int]] = set()
    for item in copies:
        places = {(True, item.block), (False, item.host_slot)}
        if run and (len(run) == most or item.to_host != run[0].to_host or places & touched):
            yield run
            run, touched = [], set()
        run.append(item)
        touched |= places
    if run:
        yield run


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeroed memory. On a CPU the system hands out zero pages at first use; filling them would take seconds."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)
