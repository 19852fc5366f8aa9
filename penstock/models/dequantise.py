"""Block-quantised rows turned into float32, for every quantised type that `gguf` reads.

Works where the data is, CPU or GPU. Knows nothing of files or models. A block's layout is stated at its function:
`d` and `m` are float16 scale and offset, `q` the packed integers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Values per pass: bounds the memory for intermediates and keeps them in a CPU's cache.
_CHUNK_VALUES = 1 << 20


@dataclass(frozen=True, slots=True)
class Dequantiser:
    """Turns rows of one type's blocks into numbers."""

    block_values: int
    block_bytes: int
    unpack: Callable[[Tensor], Tensor]  # [blocks, block_bytes] uint8 -> [blocks, block_values] float32

    def __call__(self, data: Tensor, columns: int) -> Tensor:
        """Return [..., columns] float32 of data, [..., bytes_per_row] uint8."""
        assert data.dtype == torch.uint8
        assert data.shape[-1] * self.block_values == columns * self.block_bytes
        blocks = data.reshape(-1, self.block_bytes)
        values = torch.empty(blocks.shape[0], self.block_values, dtype=torch.float32, device=data.device)
        step = _CHUNK_VALUES // self.block_values
        for start in range(0, blocks.shape[0], step):
            values[start : start + step] = self.unpack(blocks[start : start + step])
        return values.reshape(*data.shape[:-1], columns)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of every block. [blocks, 1] float32"""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).to(torch.float32)


def _nibbles(packed: Tensor) -> Tensor:
    """Low nibbles of a group of bytes, then its high ones. [..., bytes] -> [..., 2 * bytes]"""
    return torch.cat([packed & 0x0F, packed >> 4], dim=-1)


def _bits(packed: Tensor) -> Tensor:
    """Single bits, least significant first. [blocks, bytes] -> [blocks, 8 * bytes] of 0 and 1"""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(1)


def _q4_0(blocks: Tensor) -> Tensor:
    """d, 16 bytes of nibbles: d * (q - 8)."""
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:18]).to(torch.float32) - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    """d, m, 16 bytes of nibbles: d * q + m."""
    return _half(blocks, 0) * _nibbles(blocks[:, 4:20]).to(torch.float32) + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    """d, 4 bytes of fifth bits, 16 bytes of nibbles: d * (q - 16)."""
    q = _nibbles(blocks[:, 6:22]) | (_bits(blocks[:, 2:6]) << 4)
    return _half(blocks, 0) * (q.to(torch.float32) - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    """d, m, 4 bytes of fifth bits, 16 bytes of nibbles: d * q + m."""
    q = _nibbles(blocks[:, 8:24]) | (_bits(blocks[:, 4:8]) << 4)
    return _half(blocks, 0) * q.to(torch.float32) + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    """d, 32 signed bytes: d * q."""
    return _half(blocks, 0) * blocks[:, 2:34].view(torch.int8).to(torch.float32)


def scales_and_mins(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight 6-bit scales and eight 6-bit mins out of 12 bytes. [blocks, 12] -> two of [blocks, 8, 1]

    The first four of each lie in the low bits of bytes 0-3 and 4-7; the last four have their low nibbles in bytes
    8-11 and their two high bits on top of those first eight bytes.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([first & 0x3F, (third & 0x0F) | ((first >> 6) << 4)], dim=-1)
    mins = torch.cat([second & 0x3F, (third >> 4) | ((second >> 6) << 4)], dim=-1)
    return scales.to(torch.float32).unsqueeze(-1), mins.to(torch.float32).unsqueeze(-1)


def _scaled_groups(blocks: Tensor, q: Tensor) -> Tensor:
    """The K types' two-level scales: (d * scale) * q - (m * min) for 8 groups of 32. q: [blocks, 8, 32]"""
    scales, mins = scales_and_mins(blocks[:, 4:16])
    d, m = _half(blocks, 0).unsqueeze(-1), _half(blocks, 2).unsqueeze(-1)
    return ((d * scales) * q.to(torch.float32) - (m * mins)).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    """d, m, 12 bytes of scales and mins, 4 runs of 32 bytes whose nibbles are two groups."""
    q = _nibbles(blocks[:, 16:144].reshape(-1, 4, 32))
    return _scaled_groups(blocks, q.reshape(-1, 8, 32))


def _q5_k(blocks: Tensor) -> Tensor:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles: bit g of byte i belongs to value i of group g."""
    low = _nibbles(blocks[:, 48:176].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    high = (blocks[:, 16:48].unsqueeze(1) >> shifts) & 1
    return _scaled_groups(blocks, low | (high << 4))


def _q6_k(blocks: Tensor) -> Tensor:
    """128 bytes of nibbles, 64 bytes of upper bit pairs, 16 signed scales, d: (d * scale) * (q - 32).

    Two halves of 128 values; in each, four runs of 32 take the pairs of the same 32 bytes, lowest pair first.
    """
    low = _nibbles(blocks[:, 0:128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    q = (low | (high << 4)).reshape(-1, 16, 16).to(torch.float32) - 32
    scales = blocks[:, 192:208].view(torch.int8).to(torch.float32).unsqueeze(-1)
    return ((_half(blocks, 208).unsqueeze(-1) * scales) * q).flatten(1)


DEQUANTISERS: dict[str, Dequantiser] = {
    "Q4_0": Dequantiser(32, 18, _q4_0),
    "Q4_1": Dequantiser(32, 20, _q4_1),
    "Q5_0": Dequantiser(32, 22, _q5_0),
    "Q5_1": Dequantiser(32, 24, _q5_1),
    "Q8_0": Dequantiser(32, 34, _q8_0),
    "Q4_K": Dequantiser(256, 144, _q4_k),
    "Q5_K": Dequantiser(256, 176, _q5_k),
    "Q6_K": Dequantiser(256, 210, _q6_k),
}
