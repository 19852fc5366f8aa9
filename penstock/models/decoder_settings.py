"""What most families' settings have in common, read once: sizes, heads, norms, tokens.

A family calls one of these readers and changes what is its own with `dataclasses.replace`. No torch.
"""

from collections.abc import Mapping

from penstock.models.end_tokens import END_TOKEN_NAMES, gguf_end_token_ids, gguf_token_id
from penstock.models.parameters import Names, WeightLayout
from penstock.models.rope_settings import read_gguf_rope, read_rope, rope_section
from penstock.models.settings import GgufSettings, Settings
from penstock.models.spec import Activation, LayerSpec, ModelSpec, RopeSpec

_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_DTYPES: Mapping[str, str] = {name: name for name in ("float32", "float16", "bfloat16")}

MAX_LAYERS = 4096
MIN_POSITIONS = 2  # for a prompt and an answer of one token each


def read_decoder(
    settings: Settings,
    family: str,
    *,
    max_position: int,
    theta: float = 10_000.0,
    norm_eps: float = 1e-6,
    head_dim: int | None = None,
    activation_key: str = "hidden_act",
    activation: str = "silu",
    tie_embeddings: bool = False,
    ropes: tuple[RopeSpec, ...] | None = None,
    rope: Settings | None = None,
    may_be_partial: bool = False,
) -> ModelSpec:
    """Read a Llama-shaped `config.json`. The keyword arguments are the family's defaults for keys not given.

    `ropes` or `rope` stand in for what the file says of rotations, as a whole or as one section.
    """
    if "quantization_config" in settings:
        raise settings.refusal("quantization_config", "only unquantised safetensors are supported; or give a GGUF file")
    hidden_size = settings.integer("hidden_size")
    num_heads = settings.integer("num_attention_heads")
    num_kv_heads = settings.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise settings.refusal("num_key_value_heads", f"it must divide num_attention_heads ({num_heads})")
    if head_dim is None and "head_dim" not in settings and hidden_size % num_heads:
        raise settings.refusal("num_attention_heads", f"it must divide hidden_size ({hidden_size}), or give head_dim")
    head_dim = settings.integer("head_dim", head_dim or hidden_size // num_heads)
    max_position = settings.integer("max_position_embeddings", max_position, low=MIN_POSITIONS)
    if ropes is None:
        ropes = (
            read_rope(
                settings,
                rope or rope_section(settings),
                head_dim=head_dim,
                max_position=max_position,
                theta=theta,
                may_be_partial=may_be_partial,
            ),
        )
    vocab_size = settings.integer("vocab_size")
    return ModelSpec(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=settings.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=_usable_positions(max_position, ropes),
        norm_eps=settings.positive("rms_norm_eps", norm_eps),
        layers=(LayerSpec(),) * settings.integer("num_hidden_layers", high=MAX_LAYERS),
        ropes=ropes,
        activation=settings.choice(activation_key, _ACTIVATIONS, activation),
        tie_embeddings=settings.flag("tie_word_embeddings", tie_embeddings),
        dtype=settings.choice("dtype" if "dtype" in settings else "torch_dtype", _DTYPES, "float32"),
        eos_token_ids=settings.token_ids("eos_token_id", vocab_size),
        bos_token_id=settings.optional_integer("bos_token_id", low=0, high=vocab_size - 1),
    )


def _usable_positions(max_position: int, ropes: tuple[RopeSpec, ...]) -> int:
    """Yarn stretches the trained length without any change to max_position_embeddings."""
    stretched = [int(rope.factor * rope.original_max_position) for rope in ropes if rope.scaling == "yarn"]
    return max(max_position, *stretched) if stretched else max_position


def read_gguf_decoder(
    settings: GgufSettings,
    family: str,
    *,
    theta: float = 10_000.0,
    activation: Activation = "silu",
    ropes: tuple[RopeSpec, ...] | None = None,
) -> ModelSpec:
    """Read the metadata that every architecture writes."""
    hidden_size = settings.integer("embedding_length")
    num_heads = settings.integer("attention.head_count")
    num_kv_heads = settings.integer("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise settings.refusal("attention.head_count_kv", f"it must divide attention.head_count ({num_heads})")
    head_dim = settings.integer("attention.key_length", hidden_size // num_heads)
    if settings.integer("attention.value_length", head_dim) != head_dim:
        raise settings.refusal("attention.value_length", f"it must equal attention.key_length ({head_dim})")
    vocab_size = _gguf_vocab_size(settings)
    ropes = ropes or (read_gguf_rope(settings, head_dim=head_dim, theta=theta),)
    return ModelSpec(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=settings.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=_usable_positions(settings.integer("context_length", low=MIN_POSITIONS), ropes),
        norm_eps=settings.positive("attention.layer_norm_rms_epsilon"),
        layers=(LayerSpec(),) * settings.integer("block_count", high=MAX_LAYERS),
        ropes=ropes,
        activation=activation,
        tie_embeddings="output.weight" not in settings.shapes,
        attention_bias="blk.0.attn_q.bias" in settings.shapes,
        dtype="bfloat16",  # what nearly all models were trained in; float16 can overflow
        eos_token_ids=_gguf_end_tokens(settings, vocab_size),
        bos_token_id=_gguf_bos(settings, vocab_size),
    )


def _gguf_vocab_size(settings: GgufSettings) -> int:
    """Rows of the embedding. There may be more than the tokenizer has tokens, for the sake of round numbers."""
    embedding = settings.shapes.get("token_embd.weight", ())
    if not embedding:
        return settings.integer("vocab_size")
    if settings.integer("vocab_size", embedding[0]) != embedding[0]:
        raise settings.refusal("vocab_size", f"tensor token_embd.weight has {embedding[0]} rows")
    tokens = settings.values.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > embedding[0]:
        raise settings.tokenizer.refusal("tokens", f"tensor token_embd.weight has only {embedding[0]} rows")
    return embedding[0]


def _gguf_bos(settings: GgufSettings, vocab_size: int) -> int | None:
    if gguf_token_id(settings.values, "bos_token_id") is None:
        return None
    return settings.tokenizer.optional_integer("bos_token_id", low=0, high=vocab_size - 1)


def _gguf_end_tokens(settings: GgufSettings, vocab_size: int) -> tuple[int, ...]:
    ids = gguf_end_token_ids(settings.values)
    for name in END_TOKEN_NAMES:
        if settings.tokenizer.values.get(f"tokenizer.ggml.{name}") in ids:
            settings.tokenizer.token_ids(name, vocab_size)
    return ids


ATTENTION_NAMES: Names = {
    "embedding": "{model}embed_tokens.weight",
    "final_norm": "{model}norm.weight",
    "lm_head": "lm_head.weight",
    "layers.{layer}.attention_norm": "{model}layers.{layer}.input_layernorm.weight",
    "layers.{layer}.feed_forward_norm": "{model}layers.{layer}.post_attention_layernorm.weight",
    "layers.{layer}.q": "{model}layers.{layer}.self_attn.q_proj.weight",
    "layers.{layer}.k": "{model}layers.{layer}.self_attn.k_proj.weight",
    "layers.{layer}.v": "{model}layers.{layer}.self_attn.v_proj.weight",
    "layers.{layer}.o": "{model}layers.{layer}.self_attn.o_proj.weight",
    "layers.{layer}.q.bias": "{model}layers.{layer}.self_attn.q_proj.bias",
    "layers.{layer}.k.bias": "{model}layers.{layer}.self_attn.k_proj.bias",
    "layers.{layer}.v.bias": "{model}layers.{layer}.self_attn.v_proj.bias",
    "layers.{layer}.o.bias": "{model}layers.{layer}.self_attn.o_proj.bias",
    "layers.{layer}.q_norm": "{model}layers.{layer}.self_attn.q_norm.weight",
    "layers.{layer}.k_norm": "{model}layers.{layer}.self_attn.k_norm.weight",
}

FEED_FORWARD_NAMES: Names = {
    "layers.{layer}.gate": "{model}layers.{layer}.mlp.gate_proj.weight",
    "layers.{layer}.up": "{model}layers.{layer}.mlp.up_proj.weight",
    "layers.{layer}.down": "{model}layers.{layer}.mlp.down_proj.weight",
    "layers.{layer}.gate.bias": "{model}layers.{layer}.mlp.gate_proj.bias",
    "layers.{layer}.up.bias": "{model}layers.{layer}.mlp.up_proj.bias",
    "layers.{layer}.down.bias": "{model}layers.{layer}.mlp.down_proj.bias",
}

GGUF_NAMES: Names = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "lm_head": "output.weight",
    "layers.{layer}.attention_norm": "blk.{layer}.attn_norm.weight",
    "layers.{layer}.feed_forward_norm": "blk.{layer}.ffn_norm.weight",
    "layers.{layer}.q": "blk.{layer}.attn_q.weight",
    "layers.{layer}.k": "blk.{layer}.attn_k.weight",
    "layers.{layer}.v": "blk.{layer}.attn_v.weight",
    "layers.{layer}.o": "blk.{layer}.attn_output.weight",
    "layers.{layer}.q.bias": "blk.{layer}.attn_q.bias",
    "layers.{layer}.k.bias": "blk.{layer}.attn_k.bias",
    "layers.{layer}.v.bias": "blk.{layer}.attn_v.bias",
    "layers.{layer}.q_norm": "blk.{layer}.attn_q_norm.weight",
    "layers.{layer}.k_norm": "blk.{layer}.attn_k_norm.weight",
    "layers.{layer}.gate": "blk.{layer}.ffn_gate.weight",
    "layers.{layer}.up": "blk.{layer}.ffn_up.weight",
    "layers.{layer}.down": "blk.{layer}.ffn_down.weight",
    "layers.{layer}.router": "blk.{layer}.ffn_gate_inp.weight",
}

SAFETENSORS_LAYOUT = WeightLayout(names={**ATTENTION_NAMES, **FEED_FORWARD_NAMES}, prefixes=("model.",))
GGUF_LAYOUT = WeightLayout(names=GGUF_NAMES)
