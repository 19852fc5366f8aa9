"""Gemma 2: norms on both sides of each part, softcaps, and a window in every other layer."""

from dataclasses import replace

from penstock.models.decoder_settings import (
    ATTENTION_NAMES,
    FEED_FORWARD_NAMES,
    GGUF_NAMES,
    read_decoder,
    read_gguf_decoder,
)
from penstock.models.family import Family
from penstock.models.layer_types import read_windows
from penstock.models.parameters import Names, WeightLayout
from penstock.models.settings import GgufSettings, Settings
from penstock.models.spec import LayerSpec, ModelSpec

GEMMA_NAMES: Names = {
    **ATTENTION_NAMES,
    **FEED_FORWARD_NAMES,
    "layers.{layer}.post_attention_norm": "{model}layers.{layer}.post_attention_layernorm.weight",
    "layers.{layer}.feed_forward_norm": "{model}layers.{layer}.pre_feedforward_layernorm.weight",
    "layers.{layer}.post_feed_forward_norm": "{model}layers.{layer}.post_feedforward_layernorm.weight",
}

GEMMA_GGUF_LAYOUT = WeightLayout(
    names={
        **GGUF_NAMES,
        "layers.{layer}.post_attention_norm": "blk.{layer}.post_attention_norm.weight",
        "layers.{layer}.post_feed_forward_norm": "blk.{layer}.post_ffw_norm.weight",
    }
)


def read_config(settings: Settings) -> ModelSpec:
    refuse_bidirectional(settings)
    spec = read_decoder(
        settings,
        "gemma2",
        max_position=8192,
        head_dim=256,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        tie_embeddings=True,
    )
    bias = settings.flag("attention_bias", False)
    return replace(
        spec,
        attention_bias=bias,
        output_bias=bias,
        norm_offset=1.0,
        post_norms=True,
        embedding_scale=spec.hidden_size**0.5,
        attention_scale=settings.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        # Given as null they mean none; only when absent do the defaults hold.
        attention_softcap=_softcap(settings, "attn_logit_softcapping", 50.0),
        logit_softcap=_softcap(settings, "final_logit_softcapping", 30.0),
        layers=read_windows(settings, spec.num_layers, lambda number: number % 2 == 0),
    )


def refuse_bidirectional(settings: Settings) -> None:
    if settings.flag("use_bidirectional_attention", False):
        raise settings.refusal("use_bidirectional_attention", "only causal attention is supported")


def _softcap(settings: Settings, key: str, default: float) -> float | None:
    return settings.optional_number(key) if settings.is_given(key) else default


def read_gguf(settings: GgufSettings) -> ModelSpec:
    """GGUF's norms already hold one plus the weight."""
    spec = read_gguf_decoder(settings, "gemma2", activation="gelu_tanh")
    window = settings.integer("attention.sliding_window", 4096)
    layers = (LayerSpec(window=window if number % 2 == 0 else None) for number in range(spec.num_layers))
    return replace(
        spec,
        post_norms=True,
        embedding_scale=spec.hidden_size**0.5,
        attention_scale=gguf_attention_scale(spec, layers_of_27b=46),
        attention_softcap=settings.number("attn_logit_softcapping", 50.0),
        logit_softcap=settings.number("final_logit_softcapping", 30.0),
        layers=tuple(layers),
    )


def gguf_attention_scale(spec: ModelSpec, *, layers_of_27b: int) -> float:
    """GGUF does not keep the scale. It is by the head's size but in the 27B models, known by their depth."""
    size = spec.hidden_size / spec.num_heads if spec.num_layers == layers_of_27b else spec.head_dim
    return float(size**-0.5)


FAMILY = Family("gemma2", read_config, WeightLayout(GEMMA_NAMES, prefixes=("model.",)), read_gguf, GEMMA_GGUF_LAYOUT)
