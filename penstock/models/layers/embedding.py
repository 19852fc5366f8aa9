"""Token embeddings: a plain table, or one that stays as the file quantised it.

Knows nothing of the language-model head, which may share the table.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional

from penstock.models.stored_tensor import StoredTensor


class Embedding(ABC):
    @abstractmethod
    def look_up(self, token_ids: Tensor) -> Tensor:
        """token_ids: [tokens] -> a new tensor [tokens, hidden]."""

    @property
    @abstractmethod
    def num_bytes(self) -> int: ...


class DenseEmbedding(Embedding):
    def __init__(self, weight: Tensor) -> None:
        self.weight = weight  # [vocab, hidden]

    def look_up(self, token_ids: Tensor) -> Tensor:
        return functional.embedding(token_ids, self.weight)

    @property
    def num_bytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()


class QuantisedEmbedding(Embedding):
    """Dequantises the rows it looks up: a few tokens' rows cost less than the whole table's memory."""

    def __init__(self, stored: StoredTensor, device: torch.device, dtype: torch.dtype) -> None:
        assert stored.dequantise is not None
        self.rows = stored.data.to(device)  # [vocab, bytes_per_row] uint8
        self.columns = stored.shape[-1]
        self.dtype = dtype
        self._dequantise = stored.dequantise

    def look_up(self, token_ids: Tensor) -> Tensor:
        return self._dequantise(self.rows[token_ids], self.columns).to(self.dtype)

    @property
    def num_bytes(self) -> int:
        return self.rows.numel()


class ScaledEmbedding(Embedding):
    """Gemma's: every looked-up row is multiplied by one number."""

    def __init__(self, table: Embedding, scale: float) -> None:
        self.table = table
        self.scale = scale

    def look_up(self, token_ids: Tensor) -> Tensor:
        return self.table.look_up(token_ids).mul_(self.scale)

    @property
    def num_bytes(self) -> int:
        return self.table.num_bytes
