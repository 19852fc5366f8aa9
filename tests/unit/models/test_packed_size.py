"""What quantised weights are planned to take is what they take, and a little more."""

from pathlib import Path

import gguf
import pytest
import torch

from penstock.engine.config import weight_bytes
from penstock.models.decoder import Decoder
from penstock.models.gguf import GgufFile
from penstock.models.layers.embedding import DenseEmbedding
from penstock.models.loader import load_model
from penstock.models.packed_size import count_quantised
from penstock.models.registry import spec_for
from penstock.models.store import ModelFiles
from tests.gguf_models import write_gguf
from tests.tiny_models import make_reference

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "vocab_size": 1024,
    "num_hidden_layers": 1,
}


def write(path: Path, kind: str, *, tied: bool) -> ModelFiles:
    model = make_reference("llama", tie_word_embeddings=tied, num_key_value_heads=4, **SIZES)
    write_gguf(model, path, gguf.GGMLQuantizationType[kind])
    return ModelFiles("tiny", "gguf", path)


def bytes_of(decoder: Decoder) -> int:
    """What a model keeps of its matrices and its table."""
    linears = [decoder.lm_head, *(linear for layer in decoder.layers for linear in layer.linears.values())]
    is_shared = isinstance(decoder.embedding, DenseEmbedding) and decoder.spec.tie_embeddings
    return sum(linear.weight.num_bytes for linear in linears) + (0 if is_shared else decoder.embedding.num_bytes)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_the_plan_holds_what_the_weights_take_and_little_more(kind: str, tied: bool, tmp_path: Path) -> None:
    files = write(tmp_path / "tiny.gguf", kind, tied=tied)
    spec = spec_for(files)
    taken = bytes_of(load_model(files, spec, device=torch.device("cpu")))
    assert taken <= weight_bytes(spec, "auto", "float32", "cpu") <= 1.2 * taken


def test_a_gpu_and_exact_precision_hold_dense_weights(tmp_path: Path) -> None:
    spec = spec_for(write(tmp_path / "tiny.gguf", "Q4_0", tied=False))
    assert weight_bytes(spec, "auto", "bfloat16", "cuda") == 2 * spec.num_parameters
    assert weight_bytes(spec, "exact", "float32", "cpu") == 4 * spec.num_parameters


def test_matrices_that_are_packed_together_are_counted_by_the_largest(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", "Q4_0", tied=False).path
    mixed, other = GgufFile.open(path), GgufFile.open(write(tmp_path / "q8.gguf", "Q8_0", tied=False).path)
    whole = count_quantised(mixed)
    mixed.tensors["blk.0.attn_v.weight"] = other.tensors["blk.0.attn_v.weight"]
    found = count_quantised(mixed)
    assert found.num_others == whole.num_four_bit - found.num_four_bit == (512 + 2 * 256) * 512
