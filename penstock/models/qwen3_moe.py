"""Qwen 3 with experts: in every layer, or in every n-th, or in all but some."""

from dataclasses import replace

from penstock.models.decoder_settings import (
    ATTENTION_NAMES,
    FEED_FORWARD_NAMES,
    GGUF_NAMES,
    read_decoder,
    read_gguf_decoder,
)
from penstock.models.family import Family
from penstock.models.layer_types import read_window
from penstock.models.mixtral import GGUF_EXPERT_NAMES, read_moe
from penstock.models.parameters import WeightLayout
from penstock.models.settings import GgufSettings, Settings
from penstock.models.spec import LayerSpec, ModelSpec

_EXPERTS = "{model}layers.{layer}.mlp.experts.{expert}"

_SAFETENSORS = WeightLayout(
    names={
        **ATTENTION_NAMES,
        **FEED_FORWARD_NAMES,
        "layers.{layer}.router": "{model}layers.{layer}.mlp.gate.weight",
        "layers.{layer}.experts.{expert}.gate": f"{_EXPERTS}.gate_proj.weight",
        "layers.{layer}.experts.{expert}.up": f"{_EXPERTS}.up_proj.weight",
        "layers.{layer}.experts.{expert}.down": f"{_EXPERTS}.down_proj.weight",
    },
    prefixes=("model.",),
)


def read_config(settings: Settings) -> ModelSpec:
    spec = read_decoder(settings, "qwen3_moe", max_position=32_768)
    bias = settings.flag("attention_bias", False)
    window = read_window(settings) if settings.flag("use_sliding_window", False) else None
    step = settings.integer("decoder_sparse_step", 1)
    dense = settings.integers("mlp_only_layers")
    layers = tuple(
        LayerSpec(window=window, moe=number not in dense and (number + 1) % step == 0)
        for number in range(spec.num_layers)
    )
    key = "num_experts" if "num_experts" in settings else "num_local_experts"
    moe = read_moe(
        settings,
        key,
        "num_experts_per_tok",
        settings.integer("moe_intermediate_size"),
        normalise_weights=settings.flag("norm_topk_prob", False),
    )
    return replace(spec, qk_norm=True, attention_bias=bias, output_bias=bias, layers=layers, moe=moe)


def read_gguf(settings: GgufSettings) -> ModelSpec:
    spec = read_gguf_decoder(settings, "qwen3_moe")
    moe = read_moe(
        settings,
        "expert_count",
        "expert_used_count",
        settings.integer("expert_feed_forward_length"),
        # The key is newer than most files; all Qwen 3 models with experts normalise.
        normalise_weights=settings.flag("expert_weights_norm", True),
    )
    return replace(spec, qk_norm=True, layers=(LayerSpec(moe=True),) * spec.num_layers, moe=moe)


FAMILY = Family("qwen3_moe", read_config, _SAFETENSORS, read_gguf, WeightLayout({**GGUF_NAMES, **GGUF_EXPERT_NAMES}))
