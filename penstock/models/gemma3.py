"""Gemma 3 (text): Gemma 2 with norms of heads, no softcaps, and local layers that have a rope of their own.

Reads the text-only models and the text part of those that also see; their vision tensors are left aside.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from penstock.models.decoder_settings import MIN_POSITIONS, read_decoder, read_gguf_decoder
from penstock.models.family import Family
from penstock.models.gemma2 import GEMMA_GGUF_LAYOUT, GEMMA_NAMES, gguf_attention_scale, refuse_bidirectional
from penstock.models.layer_types import read_windows
from penstock.models.parameters import WeightLayout
from penstock.models.rope_settings import read_gguf_rope, read_rope
from penstock.models.settings import GgufSettings, Settings
from penstock.models.spec import LayerSpec, ModelSpec, RopeSpec

_GLOBAL, _LOCAL = 0, 1  # places in ModelSpec.ropes
_LOCAL_THETA = 10_000.0
_GLOBAL_THETA = 1_000_000.0
_PATTERN = 6  # the last of each six layers is global

_SAFETENSORS = WeightLayout(
    GEMMA_NAMES,
    prefixes=("model.", "model.language_model.", "language_model.model."),
    other_heads=("language_model.lm_head.weight",),
    ignorable=(r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*"),
)


def read_config(settings: Settings) -> ModelSpec:
    text = settings.section("text_config")
    outer = {key: settings.values[key] for key in ("dtype", "torch_dtype", "eos_token_id") if key in settings}
    given = {key: value for key, value in (text or settings).values.items() if value is not None}
    return _read_text_config(Settings({**_TEXT_DEFAULTS, **given, **outer}, (text or settings).file))


def _read_text_config(settings: Settings) -> ModelSpec:
    refuse_bidirectional(settings)
    head_dim = settings.integer("head_dim")
    max_position = settings.integer("max_position_embeddings", 131_072, low=MIN_POSITIONS)
    spec = read_decoder(
        settings,
        "gemma3",
        max_position=max_position,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        tie_embeddings=True,
        ropes=_read_ropes(settings, head_dim, max_position),
    )
    bias = settings.flag("attention_bias", False)
    pattern = settings.integer("sliding_window_pattern", _PATTERN)
    layers = read_windows(settings, spec.num_layers, lambda number: (number + 1) % pattern != 0)
    return replace(
        spec,
        attention_bias=bias,
        output_bias=bias,
        qk_norm=True,
        norm_offset=1.0,
        post_norms=True,
        embedding_scale=spec.hidden_size**0.5,
        attention_scale=settings.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        logit_softcap=settings.optional_number("final_logit_softcapping"),
        layers=_with_ropes(layers),
    )


# The files of the models that also see leave out what equals the text model's defaults.
_TEXT_DEFAULTS: Mapping[str, object] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
}


def _read_ropes(settings: Settings, head_dim: int, max_position: int) -> tuple[RopeSpec, RopeSpec]:
    """`rope_parameters` has a section for each kind of layer; `rope_scaling` adds to the global one."""
    both = settings.section("rope_parameters") or Settings({}, settings.file)
    if both.values and "full_attention" not in both and "sliding_attention" not in both:
        raise settings.refusal("rope_parameters", "give the objects full_attention and sliding_attention in it")
    of_global, of_local, scaling = (
        part or Settings({}, settings.file)
        for part in (
            both.section("full_attention"),
            both.section("sliding_attention"),
            settings.section("rope_scaling"),
        )
    )
    if "type" in scaling and "rope_type" not in scaling:
        raise scaling.refusal("type", "files of this family call it rope_type")
    merged = Settings({**of_global.values, **scaling.values}, (scaling if scaling.values else of_global).file)
    read = partial(read_rope, settings, head_dim=head_dim, max_position=max_position)
    return (
        read(merged, theta=_GLOBAL_THETA),
        read(of_local, theta=_LOCAL_THETA, theta_key="rope_local_base_freq"),
    )


def _with_ropes(layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    return tuple(replace(layer, rope=_GLOBAL if layer.window is None else _LOCAL) for layer in layers)


def read_gguf(settings: GgufSettings) -> ModelSpec:
    """GGUF's norms already hold one plus the weight."""
    head_dim = settings.integer("attention.key_length", 256)
    ropes = (
        read_gguf_rope(settings, head_dim=head_dim, theta=_GLOBAL_THETA),
        RopeSpec(settings.positive("rope.freq_base_swa", _LOCAL_THETA), head_dim),
    )
    spec = read_gguf_decoder(settings, "gemma3", activation="gelu_tanh", ropes=ropes)
    window = settings.integer("attention.sliding_window")
    layers = (LayerSpec(window=window if (number + 1) % _PATTERN else None) for number in range(spec.num_layers))
    return replace(
        spec,
        qk_norm=True,
        post_norms=True,
        embedding_scale=spec.hidden_size**0.5,
        attention_scale=gguf_attention_scale(spec, layers_of_27b=62),
        logit_softcap=settings.optional_number("final_logit_softcapping"),
        layers=_with_ropes(tuple(layers)),
    )


FAMILY = Family("gemma3", read_config, _SAFETENSORS, read_gguf, GEMMA_GGUF_LAYOUT)
