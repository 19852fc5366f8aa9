"""Small random models made with transformers, the reference that ours must equal.

Weights are drawn wide enough that every part of the model shows in the logits.
"""

import json
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from penstock.models.decoder import Decoder
from penstock.models.loader import load_model
from penstock.models.registry import spec_for
from penstock.models.store import ModelFiles
from penstock.parallel.groups import SINGLE, Group

VOCAB_SIZE = 97

SIZES: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_reference(model_type: str, folder: Path | None = None, **config: object) -> PreTrainedModel:
    """Make a model; save it to `folder` as Hugging Face does."""
    torch.manual_seed(0)
    # transformers writes into the objects that a config is made from.
    settings = AutoConfig.for_model(model_type, **deepcopy({**SIZES, **config}))
    model = AutoModelForCausalLM.from_config(settings, attn_implementation="eager", dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        fill(name, parameter.data)
    if folder is not None:
        model.save_pretrained(folder)
    return model


def fill(name: str, data: Tensor) -> None:
    if data.ndim == 1:
        data.normal_(0.0, 0.3)
        if "norm" in name:
            data.add_(1.0)
    else:
        data.normal_(0.0, 1.5 * data.shape[-1] ** -0.5)


@torch.no_grad()
def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """[tokens, vocab]"""
    return model(torch.tensor([token_ids])).logits[0]


def random_tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist()


def folder_files(folder: Path) -> ModelFiles:
    return ModelFiles("tiny", "folder", folder, folder / "config.json")


def load_exact(files: ModelFiles, context_tokens: int | None = None, group: Group = SINGLE) -> Decoder:
    return load_model(
        files,
        spec_for(files),
        device=torch.device("cpu"),
        precision="exact",
        context_tokens=context_tokens,
        group=group,
    )


def edit_config(folder: Path, **changes: object) -> None:
    """Set keys of `config.json`; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
