"""The model families, and the way from a model's files to its spec.

A family is found by `model_type` in `config.json` or by `general.architecture` in GGUF. No torch.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from penstock.errors import ModelError
from penstock.models.family import Family
from penstock.models.gguf import GgufFile
from penstock.models.packed_size import count_quantised
from penstock.models.saved_head import with_its_head
from penstock.models.settings import GgufSettings, Settings
from penstock.models.spec import ModelSpec
from penstock.models.store import ModelFiles
from penstock.models.weight_files import weight_files
from penstock.registry import Registry

FAMILIES: Registry[Family] = Registry(
    "model family",
    {
        "llama": "penstock.models.llama:FAMILY",
        "mistral": "penstock.models.mistral:FAMILY",
        "qwen2": "penstock.models.qwen2:FAMILY",
        "qwen3": "penstock.models.qwen3:FAMILY",
        "gemma2": "penstock.models.gemma2:FAMILY",
        "gemma3": "penstock.models.gemma3:FAMILY",
        "phi3": "penstock.models.phi3:FAMILY",
        "mixtral": "penstock.models.mixtral:FAMILY",
        "qwen3_moe": "penstock.models.qwen3_moe:FAMILY",
    },
)

# What files call a family where it is not the family's own name.
MODEL_TYPES: Mapping[str, str] = MappingProxyType({"gemma3_text": "gemma3"})
GGUF_ARCHITECTURES: Mapping[str, str] = MappingProxyType({"qwen3moe": "qwen3_moe"})

_MAX_JSON_BYTES = 16 * 1024 * 1024


def spec_for(files: ModelFiles) -> ModelSpec:
    """Read a model's spec from its files. Raises ModelError naming file, key and value."""
    is_dummy = files.load_format == "dummy"  # weights of which the files say nothing
    if files.kind == "gguf":
        file = GgufFile.open(files.path)
        spec = gguf_spec(file)
        return spec if is_dummy else replace(spec, quantised=count_quantised(file))
    spec = config_spec(files.config or files.path / "config.json")
    if is_dummy:
        return spec
    return with_its_head(spec, FAMILIES.load(spec.family).safetensors, weight_files(files.path))


def config_spec(config: Path) -> ModelSpec:
    """Read the spec of a Hugging Face model; the end tokens of the `generation_config.json` beside count as well."""
    settings = Settings(read_json(config), str(config))
    family = _family(settings, "model_type", settings.text("model_type"), MODEL_TYPES)
    spec = family.read_config(settings)
    generation = config.with_name("generation_config.json")
    if generation.exists():
        stops = Settings(read_json(generation), str(generation)).token_ids("eos_token_id", spec.vocab_size)
        spec = replace(spec, eos_token_ids=tuple(dict.fromkeys((*spec.eos_token_ids, *stops))))
    return spec


def gguf_spec(file: GgufFile) -> ModelSpec:
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    settings = GgufSettings(file.metadata, str(file.path), shapes, lambda name: _vector(file, name))
    general = Settings(file.metadata, str(file.path), prefix="general.")
    architecture = general.text("architecture")
    # GGUF calls Mixtral llama as well; what tells it apart is that it has experts.
    if architecture == "llama" and settings.integer("expert_count", 0, low=0) > 0:
        architecture = "mixtral"
    return _family(general, "architecture", architecture, GGUF_ARCHITECTURES).read_gguf(settings)


def _family(settings: Settings, key: str, name: str, aliases: Mapping[str, str]) -> Family:
    name = aliases.get(name, name)
    if name not in FAMILIES:
        supported = ", ".join(sorted({*FAMILIES.names, *aliases}))
        raise settings.refusal(key, f"the supported architectures are: {supported}")
    return FAMILIES.load(name)


def _vector(file: GgufFile, name: str) -> tuple[float, ...]:
    if file.tensors[name].type.name != "F32":
        raise ModelError("this tensor must be F32", file=str(file.path), tensor=name)
    return tuple(file.raw(name).reshape(-1).view(np.float32).tolist())


def read_json(path: Path) -> dict[str, object]:
    """Read an object from a JSON file. Raises ModelError naming the file."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelError(f"this file is larger than {_MAX_JSON_BYTES} bytes, which no settings are", file=str(path))
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read the model's settings: {error.strerror}", file=str(path)) from error
    except (ValueError, RecursionError) as error:  # ValueError: also of a number with thousands of digits
        raise ModelError("this is not JSON; fetch the model again", file=str(path)) from error
    if not isinstance(content, dict):
        raise ModelError("this file must hold a JSON object", file=str(path))
    return content
