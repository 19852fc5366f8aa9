"""How a matrix is kept in memory and multiplied.

A weight format packs stored tensors into the form its kernel wants, once, at load. Layers hold a `LinearWeight` and
never ask which one.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from penstock.models.stored_tensor import StoredTensor


class LinearWeight(ABC):
    """One packed matrix, [out_features, in_features]."""

    in_features: int
    out_features: int

    @abstractmethod
    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x @ W.T + bias. x: [tokens, in_features] -> [tokens, out_features]."""

    def apply_wide(self, x: Tensor) -> Tensor:
        """Return x @ W.T in float32, without rounding it to the activations' type first where that can be had."""
        return self.apply(x).float()

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
