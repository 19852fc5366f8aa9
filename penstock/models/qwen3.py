"""Qwen 3 (dense): Qwen 2 with norms of q and k heads in place of biases."""

from dataclasses import replace

from penstock.models.decoder_settings import GGUF_LAYOUT, SAFETENSORS_LAYOUT, read_decoder, read_gguf_decoder
from penstock.models.family import Family
from penstock.models.qwen2 import read_upper_windows
from penstock.models.settings import GgufSettings, Settings
from penstock.models.spec import ModelSpec


def read_config(settings: Settings) -> ModelSpec:
    spec = read_decoder(settings, "qwen3", max_position=32_768, head_dim=128)
    bias = settings.flag("attention_bias", False)
    return replace(
        spec,
        qk_norm=True,
        attention_bias=bias,
        output_bias=bias,
        layers=read_upper_windows(settings, spec.num_layers),
    )


def read_gguf(settings: GgufSettings) -> ModelSpec:
    return replace(read_gguf_decoder(settings, "qwen3"), qk_norm=True)


FAMILY = Family("qwen3", read_config, SAFETENSORS_LAYOUT, read_gguf, GGUF_LAYOUT)
