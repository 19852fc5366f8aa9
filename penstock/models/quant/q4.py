"""4-bit matrices kept as the file has them, for CPUs with a 4-bit kernel.

Q4_0 is d * (q - 8); Q4_1 is d * q + m, which is d * (q - 8) with the offset m + 8d; Q4_K is Q4_1 with scales and
offsets that are themselves quantised. The kernel takes the levels exactly and the scales as bfloat16. It is the
fastest up to about 48 rows; more go through an 8-bit copy of the matrix where the CPU has the kernel for that.
"""

from typing import ClassVar

import torch
from torch import Tensor

from penstock.kernels.quant_gemm import GROUP, FourBitGemm, Int8Gemm, four_bit_supported, int8_supported
from penstock.models.dequantise import scales_and_mins
from penstock.models.quant.int8 import int8_gemm
from penstock.models.quant.interface import LinearWeight, WeightFormat
from penstock.models.stored_tensor import StoredTensor

MAX_FOUR_BIT_ROWS = 48
_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q4_K": 144}


class Q4Weight(LinearWeight):
    def __init__(self, few_rows: FourBitGemm, many_rows: Int8Gemm | None) -> None:
        self.out_features, self.in_features = few_rows.out_features, few_rows.in_features
        self._few_rows = few_rows
        self._many_rows = many_rows
        self.uniform_rows = MAX_FOUR_BIT_ROWS

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._many_rows is None or x.shape[0] <= MAX_FOUR_BIT_ROWS:
            y = self._few_rows.multiply(x)
        else:
            y = self._many_rows.multiply(x)
        return y if bias is None else y.add_(bias)

    @property
    def num_bytes(self) -> int:
        return self._few_rows.num_bytes + (0 if self._many_rows is None else self._many_rows.num_bytes)


class Q4Format(WeightFormat):
    name: ClassVar[str] = "q4"

    def accepts(self, parts: list[StoredTensor], device: torch.device) -> bool:
        return device.type == "cpu" and all(part.type in _BLOCK_BYTES for part in parts) and four_bit_supported()

    def pack(self, parts: list[StoredTensor], device: torch.device, dtype: torch.dtype) -> Q4Weight:
        unpacked = [unpack(part) for part in parts]
        levels, scales, offsets = (torch.cat(pieces) for pieces in zip(*unpacked, strict=True))
        few_rows = FourBitGemm(levels, scales, offsets if bool(offsets.any()) else None)
        return Q4Weight(few_rows, int8_gemm(parts, keep_packed=False) if int8_supported() else None)


def unpack(part: StoredTensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return levels, uint8 [out, in], and scales and offsets, float32 [out, in / 32]: scale * (level - 8) + offset."""
    blocks = part.data.reshape(-1, _BLOCK_BYTES[part.type])
    levels, scales, offsets = _unpack_q4_k(blocks) if part.type == "Q4_K" else _unpack_q4(blocks, part.type)
    rows = part.shape[0]
    return levels.reshape(rows, -1), scales.reshape(rows, -1), offsets.reshape(rows, -1)


def _unpack_q4(blocks: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    nibbles = blocks[:, -GROUP // 2 :]
    scales = _half(blocks, 0)
    offsets = _half(blocks, 2) + 8 * scales if kind == "Q4_1" else torch.zeros_like(scales)
    return torch.cat([nibbles & 0x0F, nibbles >> 4], dim=1), scales, offsets


def _unpack_q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Two groups share a run of 32 bytes: the low nibbles are the one, the high nibbles the other.
    runs = blocks[:, 16:144].reshape(-1, 4, GROUP)
    group_scales, group_mins = (fine.squeeze(-1) for fine in scales_and_mins(blocks[:, 4:16]))
    scales = _half(blocks, 0) * group_scales  # [blocks, 8]
    return torch.stack([runs & 0x0F, runs >> 4], dim=2), scales, 8 * scales - _half(blocks, 2) * group_mins


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of every block. [blocks, 1] float32"""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()
