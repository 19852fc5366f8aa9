"""Qwen 2 and 2.5: Llama with biases on q, k and v, and a window in the upper layers where asked for."""

from dataclasses import replace

from penstock.models.decoder_settings import GGUF_LAYOUT, SAFETENSORS_LAYOUT, read_decoder, read_gguf_decoder
from penstock.models.family import Family
from penstock.models.layer_types import read_windows
from penstock.models.settings import GgufSettings, Settings
from penstock.models.spec import LayerSpec, ModelSpec


def read_config(settings: Settings) -> ModelSpec:
    spec = read_decoder(settings, "qwen2", max_position=32_768)
    return replace(spec, attention_bias=True, layers=read_upper_windows(settings, spec.num_layers))


def read_upper_windows(settings: Settings, num_layers: int) -> tuple[LayerSpec, ...]:
    """Windows from layer `max_window_layers` on, if `use_sliding_window` says so."""
    if not settings.flag("use_sliding_window", False):
        return (LayerSpec(),) * num_layers
    first = settings.integer("max_window_layers", 28, low=0)
    return read_windows(settings, num_layers, lambda number: number >= first)


def read_gguf(settings: GgufSettings) -> ModelSpec:
    return read_gguf_decoder(settings, "qwen2")


FAMILY = Family("qwen2", read_config, SAFETENSORS_LAYOUT, read_gguf, GGUF_LAYOUT)
