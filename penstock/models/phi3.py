"""Phi-3, Phi-3.5 and Phi-4 (text): Llama with q, k, v and gate, up fused in the file, and longrope."""

from dataclasses import replace

from penstock.models.decoder_settings import (
    ATTENTION_NAMES,
    FEED_FORWARD_NAMES,
    GGUF_NAMES,
    read_decoder,
    read_gguf_decoder,
)
from penstock.models.family import Family
from penstock.models.parameters import Names, Stack, WeightLayout
from penstock.models.rope_settings import rope_section
from penstock.models.settings import GgufSettings, Settings
from penstock.models.spec import LayerSpec, ModelSpec

_TRAINED = "original_max_position_embeddings"

_QKV = tuple(f"layers.{{layer}}.{name}" for name in ("q", "k", "v"))
_GATE_UP = tuple(f"layers.{{layer}}.{name}" for name in ("gate", "up"))


def _fused(qkv: str, gate_up: str) -> Names:
    return {name: Stack(qkv, _QKV) for name in _QKV} | {name: Stack(gate_up, _GATE_UP) for name in _GATE_UP}


_SAFETENSORS = WeightLayout(
    names={
        **ATTENTION_NAMES,
        **FEED_FORWARD_NAMES,
        **_fused(
            "{model}layers.{layer}.self_attn.qkv_proj.weight",
            "{model}layers.{layer}.mlp.gate_up_proj.weight",
        ),
    },
    prefixes=("model.",),
)

_GGUF = WeightLayout(
    names={**GGUF_NAMES, **_fused("blk.{layer}.attn_qkv.weight", "blk.{layer}.ffn_up.weight")},
)


def read_config(settings: Settings) -> ModelSpec:
    # What is not given is the trained length of the first models, whatever the section says.
    if _TRAINED not in settings:
        settings = Settings({**settings.values, _TRAINED: 4096}, settings.file)
    section = rope_section(settings)
    # Early files say "yarn" or "su" and mean longrope.
    if section is not None and "long_factor" in section:
        section = Settings(dict(section.values) | {"rope_type": "longrope"}, section.file)
    spec = read_decoder(settings, "phi3", max_position=4096, norm_eps=1e-5, rope=section, may_be_partial=True)
    window = settings.optional_integer("sliding_window")
    return replace(spec, layers=(LayerSpec(window=window),) * spec.num_layers)


def read_gguf(settings: GgufSettings) -> ModelSpec:
    spec = read_gguf_decoder(settings, "phi3")
    # Zero, like none at all, means no window.
    window = settings.optional_integer("attention.sliding_window", low=0) or None
    return replace(spec, layers=(LayerSpec(window=window),) * spec.num_layers)


FAMILY = Family("phi3", read_config, _SAFETENSORS, read_gguf, _GGUF)
