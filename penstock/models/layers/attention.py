"""Self-attention around a backend: projections, norms of heads, rotation.

Knows nothing of the cache: the backend writes keys and values and reads them back.
"""

from torch import Tensor

from penstock.kernels.attention.interface import AttentionBackend
from penstock.kernels.norm_rope import apply_rope
from penstock.models.layers.linear import Linear
from penstock.models.layers.norm import Norm
from penstock.parallel.collectives import all_reduce
from penstock.parallel.groups import Group


class Attention:
    """One layer's attention. `qkv` holds the rows of all query heads, then key heads, then value heads."""

    def __init__(
        self,
        layer: int,
        qkv: Linear,
        output: Linear,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        head_norm: Norm | None,
        group: Group,
    ) -> None:
        self.layer = layer
        self.qkv = qkv
        self.output = output
        self.head_norm = head_norm  # weight [query heads + key heads, head_dim]
        self.group = group
        self._heads_shape = (num_heads + 2 * num_kv_heads, head_dim)
        self._num_heads = num_heads
        self._num_rotated = num_heads + num_kv_heads

    def forward(self, x: Tensor, rotations: Tensor, attention: AttentionBackend) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        heads = self.qkv.apply(x).view(-1, *self._heads_shape)  # [tokens, query + key + value heads, head_dim]
        rotated, v = heads[:, : self._num_rotated], heads[:, self._num_rotated :]
        if self.head_norm is not None:
            rotated = self.head_norm.apply(rotated)
        apply_rope(rotated, rotations)
        q, k = rotated[:, : self._num_heads], rotated[:, self._num_heads :]
        mixed = attention.run(q, k, v, self.layer)  # [tokens, heads * head_dim]
        return all_reduce(self.output.apply(mixed), self.group)
