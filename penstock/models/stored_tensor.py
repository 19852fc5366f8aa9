"""One tensor as a file holds it, and the door through which models read them.

A `WeightSource` is an open model (safetensors folder, GGUF file or random numbers). It hands out `StoredTensor`s under
the names of the file; families map those names to their own. Nothing is converted until somebody asks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in its stored form. Row operations work on the stored form and lose nothing.

    Block-quantised tensors keep whole rows of blocks in `data`, [rows, bytes_per_row] uint8; others keep the tensor.
    """

    name: str
    file: str
    shape: tuple[int, ...]  # of the tensor it stands for, [out, in] for a matrix
    type: str  # F32, F16, BF16, Q4_1, Q8_0, Q6_K, …: GGUF's names, used for safetensors as well
    data: Tensor
    dequantise: Callable[[Tensor, int], Tensor] | None = None  # (data rows, columns) -> float32 [rows, columns]

    @property
    def is_quantised(self) -> bool:
        return self.dequantise is not None

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the tensor itself, converted if it must be."""
        if self.dequantise is None:
            return self.data.to(dtype).reshape(self.shape)
        return self.dequantise(self.data, self.shape[-1]).to(dtype).reshape(self.shape)

    def select_rows(self, rows: Tensor) -> "StoredTensor":
        """Return the tensor with its first dimension indexed by `rows`."""
        return replace(self, data=self.data[rows], shape=(len(rows), *self.shape[1:]))

    def row_range(self, start: int, stop: int) -> "StoredTensor":
        """Return rows [start, stop) without a copy."""
        return replace(self, data=self.data[start:stop], shape=(stop - start, *self.shape[1:]))


class WeightSource(ABC):
    """An open model's tensors by their names in the file."""

    @abstractmethod
    def names(self) -> Iterator[str]:
        """Every tensor's name, in file order."""

    @abstractmethod
    def has(self, name: str) -> bool: ...

    @abstractmethod
    def file_of(self, name: str) -> str:
        """The file that holds a tensor which is there."""

    @abstractmethod
    def get(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """Return a tensor of exactly this shape. Raises ModelError naming file and tensor otherwise."""
