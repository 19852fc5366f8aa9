"""Matrix products with 8-bit weights on x86 CPUs that multiply bytes in one instruction (VNNI), by FBGEMM in torch.

Activations come and go in float32; several rows are rounded each over its own range, so that none spoils another's.
Knows tensors and row counts, nothing of files or layers. Without VNNI the kernel would saturate: `vnni_supported`.
"""

import warnings
from functools import cache

import torch
from torch import Tensor

from penstock import machine
from penstock.kernels.quant_gemm import round_weight

_ENGINE = "fbgemm"
_LEVELS = 253  # one less at either end than the kernel has, for numbers that it has yet to round
_MIDDLE = 128.0  # the level of a rest that is none
_TINY = 1e-30  # keeps rows of equal numbers from dividing by zero


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
    weights are zero, hold 0 and 255: then it takes levels that were found row by row as they are. Each operation costs
    more than its arithmetic here, so there are as few as possible.

    A fine one rounds twice: what the first rounding leaves over is a row of its own, rounded as finely again. Beside
    reading the weights that costs little for a few rows, and half as much again for many.
    """

    def __init__(self, weight: Tensor, *, fine: bool = False) -> None:
        """weight: float32 [out, in]."""
        self.out_features, self.in_features = weight.shape
        self._fine = fine
        levels, scales = round_weight(weight)
        self._sums = levels.sum(dim=1, dtype=torch.float32) * scales  # [out]
        self._kernel = torch.ops.quantized.linear_dynamic.default._op
        self._packed = _pack(torch.nn.functional.pad(levels, (0, 2)), scales)
        self._levels = _room_for_levels(2, self.in_features)

    def multiply(self, x: Tensor) -> Tensor:
        """x: float32 [rows, in], contiguous -> [rows, out]."""
        num_rows = x.shape[0]
        y: Tensor
        if num_rows == 1 and not self._fine:  # the kernel's own range is the row's
            y = self._kernel(torch.constant_pad_nd(x, (0, 2)), self._packed, False)
            return y
        low, high = torch.aminmax(x, dim=1, keepdim=True)
        steps = torch.sub(high, low).mul_(1 / _LEVELS).add_(_TINY)
        inverse = steps.reciprocal()
        # A whole number, so that zero is a level: most activations are close to it.
        shifts = torch.rsub(torch.mul(low, inverse).round_(), 1.0)
        num_levels = 2 * num_rows if self._fine else num_rows
        if num_levels > len(self._levels):
            self._levels = _room_for_levels(num_levels, self.in_features)
        levels = self._levels[:num_levels]
        places = torch.addcmul(shifts, x, inverse, out=levels[:num_rows, : self.in_features])
        if not self._fine:
            y = self._kernel(levels, self._packed, False)
            return y.addcmul_(shifts, self._sums, value=-1.0).mul_(steps)
        rests = levels[num_rows:, : self.in_features]
        torch.sub(places, places.round(), out=rests).mul_(_LEVELS).add_(_MIDDLE)
        places.round_()
        coarse: Tensor
        coarse, rest = self._kernel(levels, self._packed, False).split(num_rows)
        shifts.add_(_MIDDLE / _LEVELS)
        return coarse.add_(rest, alpha=1 / _LEVELS).addcmul_(shifts, self._sums, value=-1.0).mul_(steps)

    @property
    def num_bytes(self) -> int:
        return self.out_features * (self.in_features + 2) + self._sums.nbytes


def _room_for_levels(num_rows: int, in_features: int) -> Tensor:
    room = torch.zeros(num_rows, in_features + 2)
    room[:, -1] = 255.0
    return room


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
