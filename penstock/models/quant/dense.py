"""Matrices kept as plain tensors and multiplied by `torch.nn.functional.linear`, or by a kernel for a handful of rows.

Takes any stored tensor on any device, so it is the format of last resort and, in float32, the exact one.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from penstock.models.quant.interface import LinearWeight, ProductUse, WeightFormat
from penstock.models.stored_tensor import StoredTensor

if TYPE_CHECKING:
    from penstock.kernels.library_product import LibraryProduct
    from penstock.kernels.product_tuner import ProductTuner
    from penstock.kernels.triton.few_rows import FewRowsProduct

# Products with at most so many rows have a kernel of their own on CUDA.
_FEW_ROWS = 16
# Rows are better scaled behind a product of up to so many. A few rows' product begins while the norm before it still
# runs; of many it is not launches that take the time, and each program that scales a part of a row reads the whole row.
_MOST_DEFERRED_ROWS = 512


class DenseWeight(LinearWeight):
    def __init__(self, weight: Tensor) -> None:
        self.weight = weight  # [out_features, in_features]
        self.out_features, self.in_features = weight.shape
        self.uniform_rows = sys.maxsize
        self._few_rows: FewRowsProduct | None = None
        # By rows and whether the product is wide; None where torch's own is as good.
        self._tuned: dict[tuple[int, bool], LibraryProduct | None] = {}
        self._can_gate = False
        if weight.is_cuda:
            from penstock.kernels.triton.few_rows import product_for

            self._few_rows = product_for(weight)
            self._can_gate = _can_gate(weight)

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._few_rows is not None and bias is None and x.shape[0] <= _FEW_ROWS:
            return self._few_rows.multiply(x)
        tuned = self._tuned.get((x.shape[0], False))
        if tuned is not None and bias is None and x.is_contiguous():
            return tuned.multiply(x, self.weight)
        return functional.linear(x, self.weight, bias)

    def apply_gated(self, x: Tensor, bias: Tensor | None = None, *, gelu: bool) -> Tensor:
        if bias is None and self.gates(x.shape[0]):
            from penstock.kernels.triton import hopper_gated

            return hopper_gated.gated_product(x, self.weight, gelu=gelu)
        return super().apply_gated(x, bias, gelu=gelu)

    def gates(self, num_rows: int) -> bool:
        if not self._can_gate:
            return False
        from penstock.kernels.triton import hopper_gated

        return hopper_gated.pays(num_rows, self.weight)

    def apply_wide(self, x: Tensor) -> Tensor:
        if not x.is_cuda or x.dtype == torch.float32:
            return self.apply(x).float()
        if self._few_rows is not None and x.shape[0] <= _FEW_ROWS:
            return self._few_rows.multiply(x, torch.float32)
        tuned = self._tuned.get((x.shape[0], True))
        if tuned is not None and x.is_contiguous():
            return tuned.multiply(x, self.weight)
        return torch.mm(x, self.weight.t(), out_dtype=torch.float32)

    def apply_normed(self, x: Tensor, norm: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
        if self._few_rows is not None and bias is None and self._few_rows.norms(x.shape[0]):
            return self._few_rows.multiply_normed(x, norm, eps)
        return super().apply_normed(x, norm, eps, bias)

    def defers_norm(self, num_rows: int) -> bool:
        return _FEW_ROWS < num_rows <= _MOST_DEFERRED_ROWS

    def scale_inputs(self, factors: Tensor) -> bool:
        self.weight.mul_(factors)
        return True

    def tune(self, peers: Sequence[LinearWeight], num_rows: int, use: ProductUse, tuner: "ProductTuner") -> None:
        wide = use == "wide"
        if not self.weight.is_cuda or self.weight.dtype == torch.float32 or self._tuned.get((num_rows, wide)):
            return
        if num_rows <= _FEW_ROWS and self._few_rows is not None:
            return
        if use == "gated" and self.gates(num_rows):
            return
        alike = [self, *(peer for peer in peers if isinstance(peer, DenseWeight))]
        weights = [one.weight for one in alike]
        product = tuner.product(weights, num_rows, torch.float32 if wide else self.weight.dtype)
        for one in alike:
            one._tuned[num_rows, wide] = product

    def add(self, x: Tensor, total: Tensor) -> bool:
        if self._few_rows is not None and x.shape[0] <= _FEW_ROWS:
            self._few_rows.add(x, total)
            return True
        if not x.is_cuda or x.dtype == torch.float32:
            return False
        tuned = self._tuned.get((x.shape[0], False))
        if tuned is not None and x.is_contiguous():
            tuned.add(x, self.weight, total)
        else:
            total.addmm_(x, self.weight.t())
        return True

    @property
    def num_bytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()


class DenseFormat(WeightFormat):
    name: ClassVar[str] = "dense"

    def accepts(self, parts: list[StoredTensor], device: torch.device) -> bool:
        return True

    def pack(self, parts: list[StoredTensor], device: torch.device, dtype: torch.dtype) -> DenseWeight:
        rows = sum(part.shape[0] for part in parts)
        weight = torch.empty(rows, parts[0].shape[-1], device=device, dtype=dtype)
        first = 0
        for part in parts:
            # Part by part into place: never the whole matrix twice, and the conversion runs on the file's own memory.
            weight[first : first + part.shape[0]].copy_(part.dense(_transit_dtype(part, dtype)))
            first += part.shape[0]
        return DenseWeight(weight)


def _can_gate(weight: Tensor) -> bool:
    """Whether the kernel that multiplies and gates takes this matrix, should half of it be gates."""
    from penstock.kernels.triton.hopper import runs_gluon

    if not runs_gluon(weight.device):
        return False
    from penstock.kernels.triton import hopper_gated

    return hopper_gated.fits(weight)


def _transit_dtype(part: StoredTensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if part.is_quantised else part.data.dtype
