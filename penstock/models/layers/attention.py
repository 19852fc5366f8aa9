"""Self-attention around a backend: the two projections.

Knows nothing of the cache: the backend norms and rotates heads, writes keys and values and reads them back.
"""

from torch import Tensor

from penstock.kernels.attention.interface import AttentionBackend, HeadNorm, WantedTokens
from penstock.models.layers.linear import Linear
from penstock.models.layers.norm import Norm
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
        # weight: [query heads + key heads, head_dim]
        self.head_norm = None if head_norm is None else HeadNorm(head_norm.weight, head_norm.eps)
        self.group = group
        self._heads_shape = (num_heads + 2 * num_kv_heads, head_dim)

    def advance(
        self,
        x: Tensor,
        norm: Norm | None,
        rotations: Tensor,
        attention: AttentionBackend,
        stream: Tensor | None,
        wanted: WantedTokens | None = None,
    ) -> Tensor | None:
        """Attend for x, normed first where a norm is given, and add the result to the stream, or return it.

        x: [tokens, hidden]; stream: the same, or of the wanted tokens alone where some are. See `Linear.advance`.
        """
        product, scale = self.qkv.apply_unscaled(x, norm)
        heads = product.view(-1, *self._heads_shape)  # [tokens, query + key + value heads, head_dim]
        if wanted is None:  # [tokens, heads * head_dim]
            mixed = attention.run_heads(heads, rotations, self.head_norm, self.layer, scale)
        else:
            mixed = attention.run_wanted(heads, rotations, self.head_norm, self.layer, wanted, scale)
        return self.output.advance(mixed, stream, self.group)
