"""Matrix products with 8-bit weights on x86 CPUs that multiply bytes in one instruction (VNNI), by FBGEMM in torch.

Activations come and go in float32; several rows are rounded each over its own range, so that none spoils another's.
Knows tensors and row counts, nothing of files or layers. Without VNNI the kernel would saturate: `vnni_supported`.
"""

import warnings
from functools import cache

import torch
from torch import Tensor

from penstock import machine
from penstock.kernels.quant_gemm import round_rows, round_weight

_ENGINE = "fbgemm"


@cache
def vnni_supported() -> bool:
    features = machine.cpu_features() or ()
    return (
        machine.is_x86()
        and ("avx512_vnni" in features or "avx_vnni" in features)
        and _ENGINE in torch.backends.quantized.supported_engines
    )


class VnniGemm:
    """Weights of 8 bits with one scale per row of the matrix.

    The kernel rounds what it is given to 256 levels between its least and its largest number. Two more columns, whose
    weights are zero, make it take levels that were found row by row as they are.
    """

    def __init__(self, weight: Tensor) -> None:
        """weight: float32 [out, in]."""
        self.out_features, self.in_features = weight.shape
        levels, scales = round_weight(weight)
        self._sums = levels.sum(dim=1, dtype=torch.float32) * scales  # [out]
        self._kernel = torch.ops.quantized.linear_dynamic.default._op
        self._packed = _pack(torch.nn.functional.pad(levels, (0, 2)), scales)
        self._ends = torch.tensor([0.0, 255.0])

    def multiply(self, x: Tensor) -> Tensor:
        """x: float32 [rows, in], contiguous -> [rows, out]."""
        num_rows = x.shape[0]
        y: Tensor
        if num_rows == 1:  # the kernel's own range is the row's
            y = self._kernel(torch.constant_pad_nd(x, (0, 2)), self._packed, False)
            return y
        steps, origins, levels = round_rows(x, lowest_level=0)
        y = self._kernel(torch.cat((levels, self._ends.expand(num_rows, 2)), dim=1), self._packed, False)
        return y.addcmul_(origins, self._sums).mul_(steps)

    @property
    def num_bytes(self) -> int:
        return self.out_features * (self.in_features + 2) + self._sums.nbytes


def _pack(levels: Tensor, scales: Tensor) -> torch.ScriptObject:
    """levels: int8 [out, columns]; scales: float32 [out]."""
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = _ENGINE
    try:
        with warnings.catch_warnings():
            # torch 2.13 announces the end of quantised tensors; this kernel is reached in no other way.
            warnings.filterwarnings("ignore", category=UserWarning, message=".*quantized tensor creation.*")
            quantised = torch._make_per_channel_quantized_tensor(
                levels, scales.double(), torch.zeros(len(scales), dtype=torch.int64), 0
            )
        packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(quantised, None)
    finally:
        torch.backends.quantized.engine = engine
    return packed
