"""What a decoder-only model is, as data. No torch.

A family reads its `config.json` (or GGUF metadata) into a `ModelSpec`; the decoder, the KV pool, the memory budget and
the simulator read the spec and nothing else.
"""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base, partial dimension and scaling."""

    theta: float
    rotary_dim: int  # ≤ head_dim; the rest of a head is left as it is
    scaling: Literal["none", "linear", "dynamic", "yarn", "llama3", "longrope"] = "none"
    factor: float = 1.0
    original_max_position: int = 0
    # llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # yarn
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # multiplies cos and sin; None: from the factor
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    # longrope
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A sparse feed-forward layer: the router picks `num_active` of `num_experts` for each token."""

    num_experts: int
    num_active: int
    intermediate_size: int
    normalise_weights: bool  # the picked experts' weights sum to one


@dataclass(frozen=True, slots=True)
class QuantisedSpec:
    """How much of a model its file holds in blocks of few bits."""

    num_four_bit: int  # weights in matrices of 4 bits
    num_others: int  # weights in other matrices
    table_bytes: int  # of the embedding, which is looked up as it is stored; 0: it is not quantised


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ from layer to layer."""

    window: int | None = None  # sliding attention window; None: full
    rope: int = 0  # index into ModelSpec.ropes
    moe: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    activation: Activation = "silu"
    tie_embeddings: bool = False
    attention_bias: bool = False  # on q, k and v
    output_bias: bool = False  # on o
    mlp_bias: bool = False
    qk_norm: bool = False  # an RMS norm over each head of q and k
    norm_offset: float = 0.0  # Gemma's norms multiply by (1 + weight)
    post_norms: bool = False  # Gemma's norms after attention and after the feed-forward, before the residual
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    moe: MoeSpec | None = None
    dtype: str = "bfloat16"  # what the weights were saved in
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    quantised: QuantisedSpec | None = None  # None: the file holds plain numbers

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Numbers in all matrices; norms and biases are too few to matter."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        dense = 3 * self.hidden_size * self.intermediate_size
        sparse = 0
        if self.moe is not None:
            sparse = self.hidden_size * self.moe.num_experts * (1 + 3 * self.moe.intermediate_size)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return embeddings + sum(attention + (sparse if layer.moe else dense) for layer in self.layers)
