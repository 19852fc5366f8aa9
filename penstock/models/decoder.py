"""The decoder-only transformer: one packed batch of tokens in, hidden states and logits out.

One class serves every family; what differs is in the spec and in which layers the loader hands over. There is no batch
dimension and no padding: which token belongs to whom is the attention backend's to know. No host synchronisation and
no data-dependent shapes, so a step can be captured in a CUDA graph (but see `layers.moe` for experts).
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.kernels.attention.interface import AttentionBackend, LayerAttention, WantedTokens
from penstock.models.layers.decoder_layer import DecoderLayer
from penstock.models.layers.embedding import Embedding
from penstock.models.layers.linear import Linear
from penstock.models.layers.norm import Norm
from penstock.models.layers.recorded_seams import RecordedSeams, record_seams
from penstock.models.layers.rope import Rope
from penstock.models.quant.interface import LinearWeight
from penstock.models.spec import ModelSpec
from penstock.parallel.collectives import all_gather
from penstock.parallel.groups import SINGLE, Group
from penstock.parallel.sharding import shard, shard_shared

if TYPE_CHECKING:
    from penstock.kernels.product_tuner import ProductTuner


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
        self._recorded: RecordedSeams | None = None
        # Matrices of the layers by place and shape.
        self._alike: dict[tuple[str, int, int], list[LinearWeight]] = {}
        for layer in layers:
            for place, linear in layer.linears.items():
                key = (place, linear.weight.out_features, linear.weight.in_features)
                self._alike.setdefault(key, []).append(linear.weight)

    def record(self) -> None:
        """Have `forward` of few tokens on a CPU run without Python between two attentions.

        Whatever layers are changed to later has no effect then.
        """
        self._recorded = record_seams(self.layers, self.dtype)

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend, wanted: WantedTokens | None = None
    ) -> Tensor:
        """Run all layers; `attention` must be prepared for this step.

        token_ids, positions: [tokens] integers. Returns [tokens, hidden], of the wanted tokens where some are, not
        normed yet: `logits` does that.
        """
        recorded = self._recorded
        if recorded is None or wanted is not None or len(token_ids) > recorded.max_rows:
            return self._run(self.layers, token_ids, positions, attention, wanted)
        residual, rotations = self._enter(token_ids, positions)
        return _leave(recorded.run(residual, rotations, attention), residual)

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
        residual, rotations = self._enter(token_ids, positions)
        update: Tensor | None = None
        for layer in layers[:-1]:
            update, residual = layer.forward(update, residual, rotations, attention)
        return _leave(*layers[-1].forward(update, residual, rotations, attention, wanted))

    def _enter(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the residual stream as it begins, and the rotation of each kind of layer."""
        return self.embedding.look_up(token_ids), [rope.rotations(positions) for rope in self.ropes]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden] of `forward` -> [n, vocab], float32: half a type's spacing decides between tokens."""
        logits = self.lm_head.apply_wide(self.final_norm.apply(hidden))
        logits = all_gather(logits, self.head_group)
        cap = self.spec.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _leave(update: Tensor | None, residual: Tensor) -> Tensor:
    return residual if update is None else residual.add_(update)


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
