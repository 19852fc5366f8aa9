"""Self-attention around a backend: the two projections.

Knows nothing of the cache: the backend norms and rotates heads, writes keys and values and reads them back.
"""

from torch import Tensor

from penstock.kernels.attention.interface import AttentionBackend, HeadNorm, WantedTokens
from penstock.kernels.norm_rope import RowScale
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

    def project(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, RowScale | None]:
        """Return the heads of x, normed first where a norm is given, and what is left to scale them with.

        x: [tokens, hidden] -> [tokens, query + key + value heads, head_dim].
        """
        product, scale = self.qkv.apply_unscaled(x, norm)
        return product.view(-1, *self._heads_shape), scale

    def mix(
        self,
        heads: Tensor,
        scale: RowScale | None,
        rotations: Tensor,
        attention: AttentionBackend,
        wanted: WantedTokens | None = None,
    ) -> Tensor:
        """Attend: of all tokens, or of the wanted ones where some are. Returns [tokens, heads * head_dim]."""
        if wanted is None:
            return attention.run_heads(heads, rotations, self.head_norm, self.layer, scale)
        return attention.run_wanted(heads, rotations, self.head_norm, self.layer, wanted, scale)

    def advance(self, mixed: Tensor, stream: Tensor | None) -> Tensor | None:
        """Add the output's product to the stream, or return it: see `Linear.advance`."""
        return self.output.advance(mixed, stream, self.group)
