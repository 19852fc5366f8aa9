"""Matrix products with quantised weights on an Arm CPU, from kernels that torch brings along.

Activations come and go in float32; on the way in they are rounded to 8 bits, each row or piece of a row over its own
range, so that no row is rounded by the others'. In which order float32 adds up may still depend on how many rows there
are: torch promises none. Knows tensors and row counts, nothing of files or layers.

Both classes need an Arm CPU with dot products; `four_bit_supported` and `int8_supported` say whether this one has them
and whether this torch has the kernels. What each costs is in `docs/log.md` and measured by `scripts/cpu_kernels`.
"""

import warnings
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from penstock import machine

GROUP = 32  # weights that share a scale in the 4-bit kernel
MAX_KEPT_ROWS = 64  # above, packing the weights anew in every product costs next to nothing
_ROW_COUNTS = (1, 8, 16, 24, 32, 48, MAX_KEPT_ROWS)
_MAX_PIECE = 512  # columns
_LEVELS = 127  # int8 without -128: symmetric
_TINY = 1e-30  # keeps rows of equal numbers from dividing by zero


@cache
def four_bit_supported() -> bool:
    return _has_dot_products() and torch.backends.kleidiai.is_available()


@cache
def int8_supported() -> bool:
    return (
        _has_dot_products()
        and torch.backends.mkldnn.is_acl_available()
        and "onednn" in torch.backends.quantized.supported_engines
    )


def _has_dot_products() -> bool:
    return machine.is_arm() and "asimddp" in (machine.cpu_features() or ())


class FourBitGemm:
    """Weights of 4 bits in groups of 32: scale * (level - 8) + offset. Fast for few rows.

    levels: uint8 [out, in], 0 to 15; scales: [out, in / 32], kept as bfloat16; offsets: float32 [out, in / 32] or None.
    """

    def __init__(self, levels: Tensor, scales: Tensor, offsets: Tensor | None) -> None:
        self.out_features, self.in_features = levels.shape
        pairs = levels[:, 0::2] | (levels[:, 1::2] << 4)
        self._packed = torch._dyn_quant_pack_4bit_weight(
            pairs, scales.to(torch.bfloat16), None, GROUP, self.in_features, self.out_features
        )
        self._offsets = None if offsets is None else offsets.t().contiguous()  # [in / 32, out]

    def multiply(self, x: Tensor) -> Tensor:
        """x: float32 [rows, in], contiguous -> [rows, out]."""
        y = torch._dyn_quant_matmul_4bit(x, self._packed, GROUP, self.in_features, self.out_features)
        if self._offsets is not None:
            # An offset is shared by its group, so it meets the sum of the group's activations.
            y.addmm_(x.view(-1, self._offsets.shape[0], GROUP).sum(2), self._offsets)
        return y

    @property
    def num_bytes(self) -> int:
        return self._packed.nbytes + (0 if self._offsets is None else self._offsets.nbytes)


class Int8Gemm:
    """Weights of 8 bits with one scale per row of the matrix. Fast for many rows.

    One kernel packs the weights anew in every call, which many rows hide. With `keep_packed`, another keeps them
    packed for the last two row counts it met, which pays for few rows and takes 3 bytes more per weight. Row counts
    are rounded up for it, for a new one costs as much as a step.
    """

    def __init__(self, weight: Tensor, *, keep_packed: bool) -> None:
        """weight: float32 [out, in]."""
        self.out_features, self.in_features = weight.shape
        levels, scales = round_weight(weight)
        self._scales = scales  # [out]
        pieces = levels.chunk(_num_pieces(*weight.shape), dim=1)
        self._sums = torch.stack([piece.sum(dim=1, dtype=torch.float32) for piece in pieces])  # [pieces, out]
        self._sum = self._sums.sum(0)  # [out]
        self._repacked = [_RepackedProduct(piece) for piece in pieces]
        self._kept = _KeptProduct(levels) if keep_packed else None

    def multiply(self, x: Tensor) -> Tensor:
        """x: float32 [rows, in], contiguous -> [rows, out]."""
        if self._kept is not None and x.shape[0] <= MAX_KEPT_ROWS:
            steps, origins, levels = _rounded(x, lowest_level=0)
            return self._kept.multiply(levels).addcmul_(origins, self._sum).mul_(steps).mul_(self._scales)
        steps, origins, levels = _rounded(x.view(x.shape[0], len(self._repacked), -1), lowest_level=-_LEVELS)
        pieces = levels.transpose(0, 1).to(torch.int8, memory_format=torch.contiguous_format)
        y: Tensor | None = None
        for number, product in enumerate(self._repacked):
            part = product.multiply(pieces[number]).addcmul_(origins[:, number], self._sums[number])
            part.mul_(steps[:, number])
            y = part if y is None else y.add_(part)
        assert y is not None
        return y.mul_(self._scales)

    @property
    def num_bytes(self) -> int:
        copies = 4 if self._kept is not None else 1
        return copies * self.out_features * self.in_features + self._scales.nbytes + self._sums.nbytes


def _num_pieces(out_features: int, in_features: int) -> int:
    """Into how many equal pieces a row of activations is cut, each rounded over its own range.

    An activation far from the others, as most layers of most models have, then spoils its own piece only. Every piece
    costs a pass over the output, so what gains little is left whole: wide outputs, and square matrices, which are
    attention's last and see mixtures of values.
    """
    if out_features > 2 * in_features or out_features == in_features:
        return 1
    counts = range(1, in_features + 1)
    return next(count for count in counts if in_features % count == 0 and in_features // count <= _MAX_PIECE)


def round_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 levels [out, in] and float32 scales [out]: symmetric, one scale for each row of the matrix."""
    scales = weight.abs().amax(dim=1).div_(_LEVELS).clamp_min_(_TINY)
    return weight.div(scales.unsqueeze(1)).round_().to(torch.int8), scales


def _rounded(x: Tensor, *, lowest_level: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return step and origin [..., 1] and levels [..., columns], with x close to step * (origin + level).

    Levels are whole numbers from `lowest_level` to 254 above it. So is an origin, whatever its sign, which makes zero
    one of the values: most activations are close to it, and a common error of them all would not average out.
    """
    low, high = x.amin(-1, True), x.amax(-1, True)  # much faster than aminmax
    steps = high.sub_(low).div_(2 * _LEVELS - 1).clamp_min_(_TINY)
    inverse = steps.reciprocal()
    origins = low.mul_(inverse).round_().sub_(lowest_level)
    return steps, origins, x.mul(inverse).sub_(origins).round_()


class _RepackedProduct:
    """Packs its weights in every call."""

    def __init__(self, levels: Tensor) -> None:
        """levels: int8 [out, columns]."""
        self._kernel = torch.ops.onednn.qlinear_pointwise.default._op
        packed = torch.ops.onednn.qlinear_prepack(levels.contiguous(), None)
        # Scale and zero point of the weights, then: no bias, output neither rounded nor activated.
        self._arguments: tuple[object, ...] = (packed, torch.ones(1), torch.zeros(1, dtype=torch.int32))
        self._arguments += (None, 1.0, 0, torch.float32, "none", [], "")

    def multiply(self, levels: Tensor) -> Tensor:
        """levels: int8 [rows, columns] -> float32 [rows, out]."""
        y: Tensor = self._kernel(levels, 1.0, 0, *self._arguments)
        return y


class _KeptProduct:
    """Keeps its weights packed.

    The kernel rounds what it is given to 256 levels between its least and its largest number. Two more columns, whose
    weights are zero, hold 0 and 255: so it takes levels as they are, whatever the rows hold.
    """

    def __init__(self, levels: Tensor) -> None:
        """levels: int8 [out, in]."""
        self._kernel = torch.ops.quantized.linear_dynamic.default._op
        self._packed = _pack_to_keep(functional.pad(levels, (0, 2)))
        self._ends = torch.tensor([0.0, 255.0])

    def multiply(self, levels: Tensor) -> Tensor:
        """levels: whole numbers from 0 to 255 as float32, [rows, in] -> [rows, out]."""
        num_rows = levels.shape[0]
        levels = torch.cat((levels, self._ends.expand(num_rows, 2)), dim=1)
        spare = next(count for count in _ROW_COUNTS if count >= num_rows) - num_rows
        if spare:
            levels = torch.constant_pad_nd(levels, (0, 0, 0, spare))
        y: Tensor = self._kernel(levels, self._packed, False)
        return y[:num_rows] if spare else y


def _pack_to_keep(levels: Tensor) -> torch.ScriptObject:
    """levels: int8 [out, in]. The scale of the whole is 1: the kernel knows no scales of rows."""
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "onednn"
    try:
        with warnings.catch_warnings():
            # torch 2.13 announces the end of quantised tensors; this kernel is reached in no other way.
            warnings.filterwarnings("ignore", category=UserWarning, message=".*quantized tensor creation.*")
            quantised = torch._make_per_tensor_quantized_tensor(levels, 1.0, 0)
        kept: torch.ScriptObject = torch.ops.quantized.linear_prepack(quantised, None)
    finally:
        torch.backends.quantized.engine = engine
    # The packed form holds on to this tensor but reads its own copy only.
    quantised.untyped_storage().resize_(0)
    return kept
