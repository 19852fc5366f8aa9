"""Layers that are played back give the same numbers as layers that run, to the last bit."""

import gc
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.kernels.attention.cpu import CpuAttention
from penstock.kernels.quant_gemm import four_bit_supported
from penstock.models.decoder import Decoder
from penstock.models.layers.norm import Norm
from penstock.models.layers.recorded_seams import record_seams
from penstock.models.loader import load_model
from penstock.models.quant.q4 import MAX_FOUR_BIT_ROWS
from penstock.models.registry import spec_for
from penstock.models.store import ModelFiles
from penstock.parallel.groups import Group
from tests.gguf_models import write_gguf
from tests.paged import PagedDecoder
from tests.tiny_models import folder_files, load_exact, make_reference, random_tokens

FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": 7},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 7},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 7, "num_hidden_layers": 7},
    "phi3": {},
}
# One token, several, one again: what was recorded with one number of rows must serve every other.
NUM_TOKENS = (1, 5, 1, 2, 17, 3)


def logits_of(decoder: Decoder) -> list[Tensor]:
    """Logits of steps with few tokens and many, of one request and of two."""
    paged = PagedDecoder(decoder, backend=CpuAttention, num_blocks=400)
    steps = [paged.run("a", random_tokens(count, seed=count)) for count in NUM_TOKENS]
    for number in range(3):
        steps.extend(paged.step(("a", random_tokens(1, seed=number)), ("b", random_tokens(1 + number, seed=9))))
    return steps


def assert_same(decoder: Decoder) -> None:
    expected = logits_of(decoder)
    decoder.record()
    for _ in range(2):  # what is played back may be rewritten after it ran
        for ours, theirs in zip(logits_of(decoder), expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_dense_family_is_played_back(family: str, tmp_path: Path) -> None:
    make_reference(family, tmp_path, **{"num_hidden_layers": 3, **FAMILIES[family]})
    decoder = load_exact(folder_files(tmp_path))
    assert record_seams(decoder.layers, decoder.dtype) is not None
    assert_same(decoder)


@pytest.mark.skipif(not four_bit_supported(), reason="this CPU or torch has no 4-bit kernel")
def test_four_bit_layers_are_played_back_up_to_as_many_rows_as_their_kernel_takes(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    model = make_reference("llama", num_hidden_layers=3, max_position_embeddings=512)
    write_gguf(model, path, gguf.GGMLQuantizationType.Q4_1)
    files = ModelFiles("tiny", "gguf", path, path)
    decoder = load_model(files, spec_for(files), device=torch.device("cpu"))
    recorded = record_seams(decoder.layers, decoder.dtype)
    assert recorded is not None
    assert recorded.max_rows == MAX_FOUR_BIT_ROWS
    assert_same(decoder)

    def prompt(count: int) -> Tensor:
        return PagedDecoder(decoder, backend=CpuAttention).run("c", random_tokens(count))

    decoder.layers[1].attention_norm = other_norm(decoder)
    played, ran = prompt(MAX_FOUR_BIT_ROWS), prompt(MAX_FOUR_BIT_ROWS + 1)
    assert not torch.allclose(played, ran[:-1], atol=0.1), "more rows than the recording serves ran through it"


def test_what_is_recorded_is_what_runs(tmp_path: Path) -> None:
    make_reference("llama", tmp_path)
    decoder = load_exact(folder_files(tmp_path))
    before = logits_of(decoder)
    decoder.record()
    decoder.layers[1].attention_norm = other_norm(decoder)
    assert torch.equal(logits_of(decoder)[0], before[0]), "the layers themselves still run"
    decoder.record()
    assert not torch.equal(logits_of(decoder)[0], before[0])


def test_what_is_recorded_goes_with_its_decoder(tmp_path: Path) -> None:
    make_reference("llama", tmp_path)
    decoder = load_exact(folder_files(tmp_path))
    decoder.record()
    logits_of(decoder)
    weights = [StorageWeakRef(layer.attention_norm.weight.untyped_storage()) for layer in decoder.layers]
    assert not any(weight.expired() for weight in weights)
    del decoder
    gc.collect()
    assert all(weight.expired() for weight in weights), "a closed model's weights are still held"


def test_without_a_recorder_layers_run_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_create_graph_by_tracing")
    make_reference("llama", tmp_path)
    decoder = load_exact(folder_files(tmp_path))
    assert record_seams(decoder.layers, decoder.dtype) is None
    assert_same(decoder)


def test_experts_are_not_recorded(tmp_path: Path) -> None:
    make_reference("mixtral", tmp_path, num_local_experts=4, num_experts_per_tok=2)
    decoder = load_exact(folder_files(tmp_path))
    assert record_seams(decoder.layers, decoder.dtype) is None
    assert_same(decoder)


def test_layers_that_talk_to_other_ranks_are_not_recorded(tmp_path: Path) -> None:
    make_reference("llama", tmp_path)
    decoder = load_exact(folder_files(tmp_path), group=Group(0, 2))
    assert record_seams(decoder.layers, decoder.dtype) is None


def test_products_that_depend_on_the_number_of_rows_are_not_recorded(tmp_path: Path) -> None:
    make_reference("llama", tmp_path)
    decoder = load_exact(folder_files(tmp_path))
    decoder.layers[0].attention.qkv.weight.uniform_rows = 0
    assert record_seams(decoder.layers, decoder.dtype) is None


def other_norm(decoder: Decoder) -> Norm:
    norm = decoder.layers[1].attention_norm
    return Norm(-norm.weight, norm.eps)
