"""One layer of a decoder: attention and feed-forward around the residual stream.

Knows the order of operations; which norms there are and what the matrices hold is the loader's to say.
"""

from torch import Tensor

from penstock.kernels.attention.interface import AttentionBackend, WantedTokens
from penstock.kernels.norm_rope import RowScale
from penstock.models.layers.attention import Attention
from penstock.models.layers.feed_forward import FeedForward
from penstock.models.layers.linear import Linear
from penstock.models.layers.moe import Moe
from penstock.models.layers.norm import Norm


class DecoderLayer:
    """Attention and feed-forward around the residual stream.

    A layer takes the update of the layer before, adds it to the stream together with its own first norm, and returns
    an update that is not added yet: so every addition is fused with the norm that follows it. Where a product can add
    to the stream itself there is no update, and the norm is left to the product that follows.
    """

    def __init__(
        self,
        attention: Attention,
        feed_forward: FeedForward | Moe,
        *,
        rope: int,
        attention_norm: Norm,
        feed_forward_norm: Norm,
        post_attention_norm: Norm | None,
        post_feed_forward_norm: Norm | None,
    ) -> None:
        self.attention = attention
        self.feed_forward = feed_forward
        self.rope = rope
        self.attention_norm = attention_norm
        self.feed_forward_norm = feed_forward_norm
        self.post_attention_norm = post_attention_norm
        self.post_feed_forward_norm = post_feed_forward_norm

    def fold_norms(self) -> None:
        """Take the weights of norms into the matrices behind them: then rows are scaled along with something else.

        Not where experts are chosen: to a router the last bits matter, and launches are not what such layers wait for.
        """
        if isinstance(self.feed_forward, FeedForward):
            self.attention_norm = self.attention.qkv.take_in(self.attention_norm)
            self.feed_forward_norm = self.feed_forward.gate_up.take_in(self.feed_forward_norm)

    @property
    def linears(self) -> dict[str, Linear]:
        """The matrices that multiply every token, by place."""
        return {"qkv": self.attention.qkv, "output": self.attention.output, **self.feed_forward.linears}

    def forward(
        self,
        update: Tensor | None,
        residual: Tensor,
        rotations: list[Tensor],
        attention: AttentionBackend,
        wanted: WantedTokens | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """Return the update and the residual stream, which advances in place; of the wanted tokens, where some are.

        update, residual: [tokens, hidden].
        """
        heads, scale = self.begin(update, residual)
        mixed = self.attention.mix(heads, scale, rotations[self.rope], attention, wanted)
        if wanted is not None:
            residual = residual.index_select(0, wanted.index)
        return self.end(mixed, residual), residual

    def begin(self, update: Tensor | None, residual: Tensor) -> tuple[Tensor, RowScale | None]:
        """Everything before attention: return its heads, and what is left to scale them with."""
        x, norm = _enter(self.attention_norm, update, residual)
        return self.attention.project(x, norm)

    def end(self, mixed: Tensor, residual: Tensor) -> Tensor | None:
        """Everything behind attention: return the update."""
        stream = residual if self.post_attention_norm is None else None
        update = self.attention.advance(mixed, stream)
        if self.post_attention_norm is not None and update is not None:
            update = self.post_attention_norm.apply(update)
        x, norm = _enter(self.feed_forward_norm, update, residual)
        stream = residual if self.post_feed_forward_norm is None else None
        update = self.feed_forward.advance(x, norm, stream)
        if self.post_feed_forward_norm is not None and update is not None:
            update = self.post_feed_forward_norm.apply(update)
        return update


def _enter(norm: Norm, update: Tensor | None, residual: Tensor) -> tuple[Tensor, Norm | None]:
    """Add the update, if there is one, to the stream; return what goes on, and the norm if it is still to come."""
    return (residual, norm) if update is None else (norm.add(update, residual), None)
