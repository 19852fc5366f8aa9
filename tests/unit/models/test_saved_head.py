"""A head that is saved although it is tied counts in the spec, and so in the plan of memory, where it differs."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.config import weight_bytes
from penstock.models.registry import spec_for
from tests.tiny_models import folder_files, make_reference


def save_with_head(folder: Path, dtype: torch.dtype, *, change: float) -> int:
    """Save a tied model and a head that differs from the embedding by `change` in its last number; return its size."""
    make_reference("llama", folder, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"].to(torch.bfloat16)
    head = embedding.to(dtype, copy=True)
    head[-1, -1] += change
    save_file(tensors | {"model.embed_tokens.weight": embedding, "lm_head.weight": head}, folder / "model.safetensors")
    return head.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_head_that_differs_from_the_embedding_is_counted(dtype: torch.dtype, tmp_path: Path) -> None:
    num_values = save_with_head(tmp_path / "own", dtype, change=1.0)
    save_with_head(tmp_path / "same", dtype, change=0.0)
    own, same = spec_for(folder_files(tmp_path / "own")), spec_for(folder_files(tmp_path / "same"))
    assert (own.tie_embeddings, same.tie_embeddings) == (False, True)
    assert (
        weight_bytes(own, "exact", "float32", "cpu") - weight_bytes(same, "exact", "float32", "cpu") == 4 * num_values
    )
