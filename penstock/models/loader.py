"""Builds a decoder from the tensors of a model's files.

Every parameter comes from the file and every tensor of the file is used, or the model is refused: nothing is invented
and nothing is left out. Knows layouts of parameters, not families; packing a matrix is its format's business.

Queries and keys are reordered so that the two numbers that rotate together are neighbours: scores are the same, and a
rotation is one complex product. Formats that quantise rows do not notice.
"""

import math
import re
from dataclasses import replace

import torch
from torch import Tensor

from penstock.errors import ConfigError, ModelError
from penstock.models.decoder import Decoder
from penstock.models.download import Progress
from penstock.models.gguf import BLOCK_TYPES
from penstock.models.layers.attention import Attention
from penstock.models.layers.decoder_layer import DecoderLayer
from penstock.models.layers.embedding import DenseEmbedding, Embedding, QuantisedEmbedding, ScaledEmbedding
from penstock.models.layers.feed_forward import FeedForward
from penstock.models.layers.linear import Linear
from penstock.models.layers.moe import Moe
from penstock.models.layers.norm import Norm
from penstock.models.layers.rope import Rope
from penstock.models.parameters import Part, WeightLayout, head_tensor, locate
from penstock.models.quant.dense import DenseFormat, DenseWeight
from penstock.models.quant.interface import LinearWeight
from penstock.models.quant.registry import EXACT_PRECISIONS, choose_format
from penstock.models.registry import FAMILIES
from penstock.models.spec import ModelSpec
from penstock.models.store import ModelFiles
from penstock.models.stored_tensor import StoredTensor, WeightSource
from penstock.models.weights import open_weights
from penstock.parallel.groups import SINGLE, Group
from penstock.parallel.sharding import shard, shard_shared

# Tensors that other software keeps in files although they follow from the settings.
_IGNORABLE = (r".*rotary_emb\.inv_freq", r"rope_freqs\.weight", r"rope_factors_(short|long)\.weight")

# Values looked at together in a search for damage: bounds its memory.
_SCAN_VALUES = 1 << 22


def load_model(
    files: ModelFiles,
    spec: ModelSpec,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    precision: str = "auto",
    source: WeightSource | None = None,
    group: Group = SINGLE,
    context_tokens: int | None = None,
    progress: Progress | None = None,
) -> Decoder:
    """Read, pack and place this rank's share of the weights.

    `dtype` is the activations' and that of matrices not kept quantised; "exact" and "float32" precision mean float32
    whatever it says. `context_tokens` is the longest context served: rotations are tabled up to it, and some ropes
    depend on it. Raises ModelError naming file and tensor where file and spec do not fit.
    """
    if precision in EXACT_PRECISIONS:
        dtype = torch.float32
    family = FAMILIES.load(spec.family)
    layout = family.gguf if files.kind == "gguf" else family.safetensors
    source = source or open_weights(files, dtype=dtype, device=device, progress=progress)
    builder = _Builder(spec, source, layout, group=group, device=device, dtype=dtype, precision=precision)
    decoder = builder.build(context_tokens or spec.max_position)
    builder.refuse_unused()
    return decoder


def refuse_damage(files: ModelFiles, spec: ModelSpec) -> None:
    """Raise ModelError naming the first tensor with a number that is infinite or none. Reads every weight."""
    if files.load_format == "dummy":
        return
    family, source = FAMILIES.load(spec.family), open_weights(files)
    layout = family.gguf if files.kind == "gguf" else family.safetensors
    parts = locate(spec, layout, source.has)
    shapes = {part.tensor: part.shape for part in parts.values()}
    for name, shape in shapes.items():
        stored = source.get(name, shape)
        step = max(1, _SCAN_VALUES // math.prod(shape[1:]))
        for start in range(0, shape[0], step):
            if not stored.row_range(start, min(start + step, shape[0])).dense().isfinite().all():
                raise ModelError(
                    "it holds numbers that are infinite or none (NaN); the file is damaged, fetch it again",
                    file=stored.file,
                    tensor=name,
                )


class _Builder:
    """Turns the parameters of one file into one rank's layers."""

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        layout: WeightLayout,
        *,
        group: Group,
        device: torch.device,
        dtype: torch.dtype,
        precision: str,
    ) -> None:
        self.spec = spec
        self.source = source
        self.layout = layout
        self.group = group
        self.device = device
        self.dtype = dtype
        self.precision = precision
        self.parts = locate(spec, layout, source.has)
        self.heads = shard(spec.num_heads, group, what="attention heads")
        self.kv_heads = shard_shared(spec.num_kv_heads, group, what="key-value heads")
        self._used: set[str] = set()
        self._shared: dict[str, StoredTensor] = {}  # tensors of the current layer that hold several parameters

    def build(self, context_tokens: int) -> Decoder:
        spec = self.spec
        embedding, lm_head, head_group = self._embedding_and_head()
        return Decoder(
            spec,
            dtype=self.dtype,
            embedding=embedding,
            ropes=[Rope(rope, context_tokens, self.device) for rope in spec.ropes],
            layers=[self._layer(number) for number in range(spec.num_layers)],
            final_norm=self._norm("final_norm"),
            lm_head=lm_head,
            head_group=head_group,
        )

    def refuse_unused(self) -> None:
        ignorable = re.compile("|".join((*_IGNORABLE, *self.layout.ignorable)))
        known = self._used | self._tied_names()
        unused = [name for name in self.source.names() if name not in known and not ignorable.fullmatch(name)]
        if unused:
            others = f" (and {len(unused) - 1} more)" if len(unused) > 1 else ""
            raise ModelError(
                f"the model as its settings describe it has no use for this tensor{others}; "
                "the settings belong to another model, or this variant is not supported",
                file=self.source.file_of(unused[0]),
                tensor=unused[0],
            )

    def _tied_names(self) -> set[str]:
        """A head that is saved although it is tied to the embedding is that embedding."""
        return {head_tensor(self.layout, self.source.has)} if self.spec.tie_embeddings else set()

    def _embedding_and_head(self) -> tuple[Embedding, Linear, Group]:
        stored = self._stored("embedding")
        # A vocabulary that does not split evenly is small enough to be kept whole by every rank.
        head_group = self.group if self.spec.vocab_size % self.group.size == 0 else SINGLE
        head_part = stored if self.spec.tie_embeddings else self._stored("lm_head")
        head = self._pack([head_part.row_range(*shard(self.spec.vocab_size, head_group, what="vocabulary"))])
        table: Embedding
        if self.spec.tie_embeddings and isinstance(head, DenseWeight) and head_group.size == 1:
            table = DenseEmbedding(head.weight)
        elif stored.is_quantised and self.precision == "auto":
            table = QuantisedEmbedding(stored, self.device, self.dtype)
        else:
            table = DenseEmbedding(DenseFormat().pack([stored], self.device, self.dtype).weight)
        if self.spec.embedding_scale != 1.0:
            # The reference rounds the scale to the weights' dtype, and the models were trained so.
            table = ScaledEmbedding(table, torch.tensor(self.spec.embedding_scale, dtype=self.dtype).item())
        return table, Linear(head), head_group

    def _layer(self, number: int) -> DecoderLayer:
        self._shared.clear()
        spec, prefix = self.spec, f"layers.{number}."
        layer = spec.layers[number]
        built = DecoderLayer(
            self._attention(number),
            self._moe(prefix) if layer.moe else self._feed_forward(prefix, spec.intermediate_size, self.group),
            rope=layer.rope,
            attention_norm=self._norm(prefix + "attention_norm"),
            feed_forward_norm=self._norm(prefix + "feed_forward_norm"),
            post_attention_norm=self._norm(prefix + "post_attention_norm") if spec.post_norms else None,
            post_feed_forward_norm=self._norm(prefix + "post_feed_forward_norm") if spec.post_norms else None,
        )
        # What is rounded once more here is rounded once less where products are added up.
        if self.device.type == "cuda" and self.dtype == torch.bfloat16:
            built.fold_norms()
        return built

    def _attention(self, number: int) -> Attention:
        spec, prefix = self.spec, f"layers.{number}."
        rotary_dim = spec.ropes[spec.layers[number].rope].rotary_dim

        def heads_of(name: str) -> StoredTensor:
            """This rank's heads of q, k or v, or of their biases; q and k in the order that rotates."""
            first, last = self.heads if name.startswith("q") else self.kv_heads
            part = self._stored(prefix + name).row_range(first * spec.head_dim, last * spec.head_dim)
            if name.startswith("v") or self.layout.rotary_pairs:
                return part
            return part.select_rows(pair_order(last - first, spec.head_dim, rotary_dim))

        bias = None
        if spec.attention_bias:
            bias = torch.cat([self._vector(heads_of(f"{name}.bias")) for name in "qkv"]).to(self.dtype)
        columns = (self.heads[0] * spec.head_dim, self.heads[1] * spec.head_dim)
        output = self._pack([column_range(self._stored(prefix + "o"), *columns)])
        return Attention(
            number,
            Linear(self._pack([heads_of("q"), heads_of("k"), heads_of("v")]), bias),
            Linear(output, self._output_bias(prefix + "o.bias") if spec.output_bias else None),
            num_heads=self.heads[1] - self.heads[0],
            num_kv_heads=self.kv_heads[1] - self.kv_heads[0],
            head_dim=spec.head_dim,
            head_norm=self._head_norm(prefix, rotary_dim) if spec.qk_norm else None,
            group=self.group,
        )

    def _head_norm(self, prefix: str, rotary_dim: int) -> Norm:
        """One norm for query and key heads together; each head has its row of weights."""
        order = torch.arange(self.spec.head_dim)
        if not self.layout.rotary_pairs:
            order = pair_order(1, self.spec.head_dim, rotary_dim)
        rows = [
            self._vector(self._stored(prefix + name).select_rows(order)).expand(last - first, -1)
            for name, (first, last) in (("q_norm", self.heads), ("k_norm", self.kv_heads))
        ]
        return Norm(torch.cat(rows) + self.spec.norm_offset, self.spec.norm_eps)

    def _feed_forward(self, prefix: str, intermediate: int, group: Group) -> FeedForward:
        first, last = shard(intermediate, self.group, what="feed-forward size")
        gate_up = self._pack([self._stored(prefix + name).row_range(first, last) for name in ("gate", "up")])
        down = self._pack([column_range(self._stored(prefix + "down"), first, last)])
        if not self.spec.mlp_bias:
            return FeedForward(Linear(gate_up), Linear(down), self.spec.activation, group)
        biases = [self._vector(self._stored(f"{prefix}{name}.bias").row_range(first, last)) for name in ("gate", "up")]
        return FeedForward(
            Linear(gate_up, torch.cat(biases).to(self.dtype)),
            Linear(down, self._output_bias(prefix + "down.bias")),
            self.spec.activation,
            group,
        )

    def _moe(self, prefix: str) -> Moe:
        assert self.spec.moe is not None
        router = DenseFormat().pack([self._stored(prefix + "router")], self.device, self.dtype)
        experts = [
            self._feed_forward(f"{prefix}experts.{number}.", self.spec.moe.intermediate_size, SINGLE)
            for number in range(self.spec.moe.num_experts)
        ]
        return Moe(Linear(router), experts, self.spec.moe, self.group)

    def _norm(self, name: str) -> Norm:
        return Norm(self._vector(self._stored(name)) + self.spec.norm_offset, self.spec.norm_eps)

    def _output_bias(self, name: str) -> Tensor | None:
        """The bias of a product that ranks sum up: only one of them may add it."""
        bias = self._vector(self._stored(name)).to(self.dtype)
        return bias if self.group.rank == 0 else None

    def _vector(self, stored: StoredTensor) -> Tensor:
        return stored.dense(torch.float32).to(self.device)

    def _pack(self, parts: list[StoredTensor]) -> LinearWeight:
        return choose_format(parts, self.device, self.dtype, self.precision).pack(parts, self.device, self.dtype)

    def _stored(self, name: str) -> StoredTensor:
        """Fetch a parameter in its stored form, cut out of the tensor that holds it."""
        part = self.parts[name]
        self._used.add(part.tensor)
        if part.rows is None:
            return self.source.get(part.tensor, part.shape)
        if part.tensor not in self._shared:
            self._shared[part.tensor] = _flat(part, self.source.get(part.tensor, part.shape))
        return self._shared[part.tensor].row_range(*part.rows)


def _flat(part: Part, stored: StoredTensor) -> StoredTensor:
    """The matrices of a stack of experts one below the other; anything else as it is."""
    if len(part.shape) < 3:
        return stored
    rows = part.shape[0] * part.shape[1]
    return replace(stored, shape=(rows, part.shape[2]), data=stored.data.reshape(rows, -1))


def pair_order(num_heads: int, head_dim: int, rotary_dim: int) -> Tensor:
    """Rows of heads, [num_heads * head_dim], ordered so that i and i + rotary_dim / 2 of a head become neighbours."""
    within = torch.arange(head_dim)
    within[:rotary_dim] = within[:rotary_dim].view(2, -1).T.reshape(-1)
    return (torch.arange(num_heads)[:, None] * head_dim + within).reshape(-1)


def column_range(stored: StoredTensor, start: int, stop: int) -> StoredTensor:
    """Return columns [start, stop) of a matrix. Raises ConfigError where that would cut a quantised block."""
    columns = stored.shape[-1]
    if (start, stop) == (0, columns):
        return stored
    block = next((known for known in BLOCK_TYPES.values() if known.name == stored.type), None)
    if not stored.is_quantised or block is None:
        return replace(stored, shape=(stored.shape[0], stop - start), data=stored.data[:, start:stop])
    if start % block.block_values or stop % block.block_values:
        right = f"it would cut the {stored.type} blocks of {stored.name}; use fewer ranks or another file"
        raise ConfigError("--tensor-parallel", columns // (stop - start), right)
    first, last = (edge // block.block_values * block.block_bytes for edge in (start, stop))
    return replace(stored, shape=(stored.shape[0], stop - start), data=stored.data[:, first:last])
