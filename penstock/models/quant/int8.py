"""Quantised matrices turned into 8 bits with one scale per row, for CPUs whose 8-bit kernels beat float32.

Takes any block-quantised type: its rows are turned back into numbers and rounded once more, finely enough that the
perplexity does not show it (`docs/log.md`). Matrices that the file kept as floating point stay dense.
"""

from typing import ClassVar

import torch
from torch import Tensor

from penstock.kernels.quant_gemm import Int8Gemm, int8_supported
from penstock.kernels.vnni_gemm import VnniGemm, vnni_supported
from penstock.models.quant.interface import LinearWeight, WeightFormat
from penstock.models.stored_tensor import StoredTensor


class Int8Weight(LinearWeight):
    def __init__(self, gemm: Int8Gemm | VnniGemm) -> None:
        self.out_features, self.in_features = gemm.out_features, gemm.in_features
        self._gemm = gemm

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self._gemm.multiply(x)
        return y if bias is None else y.add_(bias)

    @property
    def num_bytes(self) -> int:
        return self._gemm.num_bytes


class Int8Format(WeightFormat):
    name: ClassVar[str] = "int8"

    def accepts(self, parts: list[StoredTensor], device: torch.device) -> bool:
        is_fast = int8_supported() or vnni_supported()
        return device.type == "cpu" and all(part.is_quantised for part in parts) and is_fast

    def pack(self, parts: list[StoredTensor], device: torch.device, dtype: torch.dtype) -> Int8Weight:
        if vnni_supported():
            weight = _dense(parts)
            # What goes into a matrix that makes rows shorter, the way down from a gated layer, has the longest tails:
            # rounding it coarsely costs half of all that is lost.
            return Int8Weight(VnniGemm(weight, fine=weight.shape[1] > weight.shape[0]))
        return Int8Weight(int8_gemm(parts, keep_packed=True))


def int8_gemm(parts: list[StoredTensor], *, keep_packed: bool) -> Int8Gemm:
    return Int8Gemm(_dense(parts), keep_packed=keep_packed)


def _dense(parts: list[StoredTensor]) -> Tensor:
    return torch.cat([part.dense() for part in parts])
