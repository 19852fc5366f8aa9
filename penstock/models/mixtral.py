"""Mixtral: Mistral with experts in every layer.

In GGUF it goes by `llama`; a count of experts tells it apart.
"""

from dataclasses import replace

from penstock.models.decoder_settings import ATTENTION_NAMES, GGUF_NAMES, read_decoder, read_gguf_decoder
from penstock.models.family import Family
from penstock.models.parameters import Experts, Names, WeightLayout
from penstock.models.settings import GgufSettings, Settings
from penstock.models.spec import LayerSpec, ModelSpec, MoeSpec

_EXPERTS = "{model}layers.{layer}.block_sparse_moe.experts.{expert}"

_SAFETENSORS = WeightLayout(
    names={
        **ATTENTION_NAMES,
        "layers.{layer}.router": "{model}layers.{layer}.block_sparse_moe.gate.weight",
        "layers.{layer}.experts.{expert}.gate": f"{_EXPERTS}.w1.weight",
        "layers.{layer}.experts.{expert}.down": f"{_EXPERTS}.w2.weight",
        "layers.{layer}.experts.{expert}.up": f"{_EXPERTS}.w3.weight",
    },
    prefixes=("model.",),
)

GGUF_EXPERT_NAMES: Names = {
    "layers.{layer}.experts.{expert}.gate": Experts("blk.{layer}.ffn_gate_exps.weight"),
    "layers.{layer}.experts.{expert}.up": Experts("blk.{layer}.ffn_up_exps.weight"),
    "layers.{layer}.experts.{expert}.down": Experts("blk.{layer}.ffn_down_exps.weight"),
}


def read_config(settings: Settings) -> ModelSpec:
    spec = read_decoder(settings, "mixtral", max_position=131_072, theta=1_000_000.0, norm_eps=1e-5)
    layer = LayerSpec(window=settings.optional_integer("sliding_window"), moe=True)
    key = "num_local_experts" if "num_local_experts" in settings else "num_experts"
    moe = read_moe(settings, key, "num_experts_per_tok", spec.intermediate_size, normalise_weights=True)
    return replace(spec, layers=(layer,) * spec.num_layers, moe=moe)


def read_gguf(settings: GgufSettings) -> ModelSpec:
    spec = read_gguf_decoder(settings, "mixtral")
    moe = read_moe(settings, "expert_count", "expert_used_count", spec.intermediate_size, normalise_weights=True)
    return replace(spec, layers=(LayerSpec(moe=True),) * spec.num_layers, moe=moe)


def read_moe(
    settings: Settings, experts_key: str, active_key: str, intermediate_size: int, *, normalise_weights: bool
) -> MoeSpec:
    num_experts = settings.integer(experts_key)
    num_active = settings.integer(active_key)
    if num_active > num_experts:
        raise settings.refusal(active_key, f"there are only {num_experts} experts")
    return MoeSpec(num_experts, num_active, intermediate_size, normalise_weights)


_GGUF = WeightLayout({**GGUF_NAMES, **GGUF_EXPERT_NAMES}, rotary_pairs=True)

FAMILY = Family("mixtral", read_config, _SAFETENSORS, read_gguf, _GGUF)
