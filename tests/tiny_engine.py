"""A real engine around a tiny random model, in the test's own process."""

import dataclasses
import json
from pathlib import Path

import torch

from penstock.config import gather
from penstock.engine.builder import assemble
from penstock.engine.config import EngineConfig, resolve
from penstock.engine.engine import Engine
from penstock.engine.runner.device import probe
from penstock.engine.runner.torch_device import make_runner
from penstock.models.decoder import Decoder
from penstock.models.loader import load_model
from penstock.models.registry import spec_for
from penstock.models.spec import ModelSpec
from penstock.models.store import ModelFiles

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 32,
    "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 96, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "float32",
}  # fmt: skip


@dataclasses.dataclass
class LoadedModel:
    config: EngineConfig
    spec: ModelSpec
    model: Decoder


def load_tiny(folder: Path, **changes: object) -> LoadedModel:
    """Write a bare config.json into the folder, with these entries changed, and load random float32 weights for it."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    files = ModelFiles("tiny", "folder", folder, folder / "config.json", load_format="dummy")
    spec = spec_for(files)
    config, _ = resolve(gather({"precision": "exact", "kv_memory": "1MiB"}, environ={}), spec, probe("cpu", spec))
    model = load_model(files, spec, device=torch.device("cpu"), dtype=torch.float32, precision="exact")
    return LoadedModel(config, spec, model)


def engine_of(loaded: LoadedModel, **changes: object) -> Engine:
    """Return a new engine around the model, with settings changed."""
    config = dataclasses.replace(loaded.config, **changes)
    return assemble(config, loaded.spec, make_runner(config, loaded.spec, loaded.model))
