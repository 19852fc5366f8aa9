"""The decoder-only transformer: one packed batch of tokens in, hidden states and logits out.

One class serves every family; what differs is in the spec and in which layers the loader hands over. There is no batch
dimension and no padding: which token belongs to whom is the attention backend's to know. No host synchronisation and
no data-dependent shapes, so a step can be captured in a CUDA graph (but see `layers.moe` for experts).
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.kernels.attention.interface import AttentionBackend, LayerAttention, WantedTokens
from penstock.models.layers.attention import Attention
from penstock.models.layers.embedding import Embedding
from penstock.models.layers.feed_forward import FeedForward
from penstock.models.layers.linear import Linear
from penstock.models.layers.moe import Moe
from penstock.models.layers.norm import Norm
from penstock.models.layers.rope import Rope
from penstock.models.quant.interface import LinearWeight
from penstock.models.spec import ModelSpec
from penstock.parallel.collectives import all_gather
from penstock.parallel.groups import SINGLE, Group
from penstock.parallel.sharding import shard, shard_shared

if TYPE_CHECKING:
    from penstock.kernels.product_tuner import ProductTuner


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
        x, norm = _enter(self.attention_norm, update, residual)
        if wanted is not None:
            residual = residual.index_select(0, wanted.index)
        stream = residual if self.post_attention_norm is None else None
        update = self.attention.advance(x, norm, rotations[self.rope], attention, stream, wanted)
        if self.post_attention_norm is not None and update is not None:
            update = self.post_attention_norm.apply(update)
        x, norm = _enter(self.feed_forward_norm, update, residual)
        stream = residual if self.post_feed_forward_norm is None else None
        update = self.feed_forward.advance(x, norm, stream)
        if self.post_feed_forward_norm is not None and update is not None:
            update = self.post_feed_forward_norm.apply(update)
        return update, residual


def _enter(norm: Norm, update: Tensor | None, residual: Tensor) -> tuple[Tensor, Norm | None]:
    """Add the update, if there is one, to the stream; return what goes on, and the norm if it is still to come."""
    return (residual, norm) if update is None else (norm.add(update, residual), None)


class Decoder:
    """A loaded model on one rank."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        embedding: Embedding,
        ropes: list[Rope],
        layers: list[DecoderLayer],
        final_norm: Norm,
        lm_head: Linear,
        head_group: Group,
    ) -> None:
        self.spec = spec
        self.dtype = dtype  # of activations, and so of keys and values
        self.embedding = embedding
        self.ropes = ropes
        self.layers = layers
        self.final_norm = final_norm
        self.lm_head = lm_head
        self.head_group = head_group  # the ranks that share the head's rows
        # Matrices of the layers by place and shape.
        self._alike: dict[tuple[str, int, int], list[LinearWeight]] = {}
        for layer in layers:
            for place, linear in layer.linears.items():
                key = (place, linear.weight.out_features, linear.weight.in_features)
                self._alike.setdefault(key, []).append(linear.weight)

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend, wanted: WantedTokens | None = None
    ) -> Tensor:
        """Run all layers; `attention` must be prepared for this step.

        token_ids, positions: [tokens] integers. Returns [tokens, hidden], of the wanted tokens where some are, not
        normed yet: `logits` does that.
        """
        return self._run(self.layers, token_ids, positions, attention, wanted)

    @torch.inference_mode()
    def touch(
        self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend, wanted: WantedTokens | None = None
    ) -> Tensor:
        """Run one layer of each kind, which loads every kernel that `forward` launches for so many tokens.

        Takes what `forward` takes and returns its shape, of no meaning.
        """
        kinds = dict(zip(reversed(self.spec.layers), reversed(self.layers), strict=True))
        # The last layer runs another way where only some tokens are wanted.
        last = [] if wanted is None else self.layers[-1:]
        return self._run([*kinds.values(), *last], token_ids, positions, attention, wanted)

    @torch.inference_mode()
    def tune(self, num_tokens: int, tuner: "ProductTuner") -> None:
        """Have `forward` of so many tokens run as fast as the tuner knows, or finds out."""
        for (place, _, _), (first, *peers) in self._alike.items():
            first.tune(peers, num_tokens, "gated" if place == "gate_up" else "plain", tuner)

    @torch.inference_mode()
    def tune_logits(self, num_rows: int, tuner: "ProductTuner") -> None:
        """The same for `logits` of so many rows."""
        self.lm_head.weight.tune((), num_rows, "wide", tuner)

    def _run(
        self,
        layers: list[DecoderLayer],
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        wanted: WantedTokens | None,
    ) -> Tensor:
        residual = self.embedding.look_up(token_ids)
        rotations = [rope.rotations(positions) for rope in self.ropes]
        update: Tensor | None = None
        for layer in layers[:-1]:
            update, residual = layer.forward(update, residual, rotations, attention)
        update, residual = layers[-1].forward(update, residual, rotations, attention, wanted)
        return residual if update is None else residual.add_(update)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden] of `forward` -> [n, vocab], float32: half a type's spacing decides between tokens."""
        logits = self.lm_head.apply_wide(self.final_norm.apply(hidden))
        logits = all_gather(logits, self.head_group)
        cap = self.spec.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def attention_layers(spec: ModelSpec, group: Group = SINGLE) -> list[LayerAttention]:
    """What each layer asks of the KV pool and the attention backend of a rank."""
    heads = shard(spec.num_heads, group, what="attention heads")
    kv_heads = shard_shared(spec.num_kv_heads, group, what="key-value heads")
    scale = spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
    return [
        LayerAttention(
            num_heads=heads[1] - heads[0],
            num_kv_heads=kv_heads[1] - kv_heads[0],
            head_dim=spec.head_dim,
            scale=scale,
            window=layer.window,
            softcap=spec.attention_softcap,
        )
        for layer in spec.layers
    ]
