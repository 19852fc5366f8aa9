"""Mistral: Llama with a sliding window in every layer of its first versions.

In GGUF it goes by `llama`, which keeps no window; files made from windowed models are then read as full attention.
"""

from dataclasses import replace

from penstock.models.decoder_settings import SAFETENSORS_LAYOUT, read_decoder
from penstock.models.family import Family
from penstock.models.layer_types import read_window
from penstock.models.llama import LLAMA_GGUF_LAYOUT, read_gguf
from penstock.models.settings import Settings
from penstock.models.spec import LayerSpec, ModelSpec


def read_config(settings: Settings) -> ModelSpec:
    if "layer_types" in settings:
        raise settings.refusal("layer_types", "a Mistral model has one kind of layer")
    spec = read_decoder(settings, "mistral", max_position=131_072)
    return replace(spec, layers=(LayerSpec(window=read_window(settings)),) * spec.num_layers)


FAMILY = Family("mistral", read_config, SAFETENSORS_LAYOUT, read_gguf, LLAMA_GGUF_LAYOUT)
