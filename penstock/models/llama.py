"""Llama 1 to 3.2 (text), SmolLM2, TinyLlama and the many models that call themselves `llama`.

Also read from GGUF's `llama` architecture, whose q and k rows are stored in pairs.
"""

from dataclasses import replace

from penstock.models.decoder_settings import GGUF_NAMES, SAFETENSORS_LAYOUT, read_decoder, read_gguf_decoder
from penstock.models.family import Family
from penstock.models.parameters import WeightLayout
from penstock.models.settings import GgufSettings, Settings
from penstock.models.spec import ModelSpec

LLAMA_GGUF_LAYOUT = WeightLayout(names=GGUF_NAMES, rotary_pairs=True)


def read_config(settings: Settings) -> ModelSpec:
    spec = read_decoder(settings, "llama", max_position=2048)
    bias = settings.flag("attention_bias", False)
    return replace(spec, attention_bias=bias, output_bias=bias, mlp_bias=settings.flag("mlp_bias", False))


def read_gguf(settings: GgufSettings) -> ModelSpec:
    return read_gguf_decoder(settings, "llama")


FAMILY = Family("llama", read_config, SAFETENSORS_LAYOUT, read_gguf, LLAMA_GGUF_LAYOUT)
