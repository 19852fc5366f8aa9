"""How a matrix is kept in memory and multiplied.

A weight format packs stored tensors into the form its kernel wants, once, at load. Layers hold a `LinearWeight` and
never ask which one.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from penstock.kernels.activation import gate
from penstock.kernels.norm_rope import rms_norm
from penstock.models.stored_tensor import StoredTensor

if TYPE_CHECKING:
    from penstock.kernels.product_tuner import ProductTuner

# What a matrix is for: `apply`, `apply_gated` or `apply_wide`.
ProductUse = Literal["plain", "gated", "wide"]


class LinearWeight(ABC):
    """One packed matrix, [out_features, in_features]."""

    in_features: int
    out_features: int
    # Up to so many rows all but CUDA's products are the same operations, whatever the number; 0: that depends.
    uniform_rows: int = 0

    @abstractmethod
    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x @ W.T + bias. x: [tokens, in_features] -> [tokens, out_features]."""

    def apply_gated(self, x: Tensor, bias: Tensor | None = None, *, gelu: bool) -> Tensor:
        """Return act(gates) * ups of `apply`, whose first half are gates. x: [tokens, in] -> [tokens, out / 2]."""
        return gate(self.apply(x, bias), gelu=gelu)

    def apply_wide(self, x: Tensor) -> Tensor:
        """Return x @ W.T in float32, without rounding it to the activations' type first where that can be had."""
        return self.apply(x).float()

    def apply_normed(self, x: Tensor, norm: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
        """Return `apply` of the RMS norm of x. norm: [in_features] float32."""
        return self.apply(rms_norm(x, norm, eps), bias)

    def scale_inputs(self, factors: Tensor) -> bool:
        """Multiply the columns with their factors in place, or return False where the form does not allow it.

        factors: [in_features] float32.
        """
        return False

    def defers_norm(self, num_rows: int) -> bool:
        """Whether so many rows are better scaled behind the product than normed before it."""
        return False

    def gates(self, num_rows: int) -> bool:
        """Whether `apply_gated` of so many rows needs no kernel beside the product's."""
        return False

    def add(self, x: Tensor, total: Tensor) -> bool:
        """Add x @ W.T to the total in place, or change nothing and return False where no kernel does that."""
        return False

    def tune(  # noqa: B027 - for formats with a choice
        self, peers: Sequence["LinearWeight"], num_rows: int, use: ProductUse, tuner: "ProductTuner"
    ) -> None:
        """Have products of so many rows run as fast as the tuner knows: of this matrix, and of peers of the same shape.

        May take milliseconds; must not be called during a capture.
        """

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory the packed form takes."""


class WeightFormat(ABC):
    """Packs matrices."""

    name: ClassVar[str]

    @abstractmethod
    def accepts(self, parts: list[StoredTensor], device: torch.device) -> bool:
        """Whether `pack` can take these parts on this device."""

    @abstractmethod
    def pack(self, parts: list[StoredTensor], device: torch.device, dtype: torch.dtype) -> LinearWeight:
        """Stack the parts along their rows (q, k and v; gate and up) and pack them as one matrix."""
