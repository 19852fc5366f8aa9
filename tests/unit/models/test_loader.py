"""Every parameter comes from the file and every tensor of the file is used, or the model is refused."""

import json
import re
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from penstock.errors import ConfigError, ModelError
from penstock.models.decoder import Decoder
from penstock.models.loader import column_range, load_model, pair_order
from penstock.models.quant.dense import DenseWeight
from penstock.models.registry import spec_for
from penstock.models.store import ModelFiles
from penstock.models.stored_tensor import StoredTensor
from penstock.models.weights import GgufFile, GgufSource
from tests.gguf_models import write_gguf
from tests.paged import PagedDecoder
from tests.tiny_models import (
    SIZES,
    edit_config,
    fill,
    folder_files,
    load_exact,
    make_reference,
    random_tokens,
    reference_logits,
)

CPU = torch.device("cpu")


def edit_tensors(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Set tensors of the saved model; None removes one."""
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def load(files: ModelFiles, **options: object) -> Decoder:
    return load_model(files, spec_for(files), device=CPU, **options)  # type: ignore[arg-type]


def test_a_missing_tensor_is_refused_with_file_and_name(tmp_path: Path) -> None:
    make_reference("llama", tmp_path)
    edit_tensors(tmp_path, {"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(ModelError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight") as refusal:
        load(folder_files(tmp_path))
    assert str(tmp_path) in str(refusal.value)


def test_a_tensor_of_the_wrong_shape_is_refused_with_both_shapes(tmp_path: Path) -> None:
    make_reference("llama", tmp_path)
    edit_tensors(tmp_path, {"model.layers.0.self_attn.k_proj.weight": torch.zeros(48, 64)})
    with pytest.raises(ModelError, match=r"k_proj\.weight.*\[48, 64\].*\[32, 64\]"):
        load(folder_files(tmp_path))


def test_a_tensor_without_a_use_is_refused_with_its_name(tmp_path: Path) -> None:
    make_reference("llama", tmp_path)
    edit_tensors(tmp_path, {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    with pytest.raises(ModelError, match=r"tensor model\.layers\.0\.self_attn\.q_proj\.bias: .* no use"):
        load(folder_files(tmp_path))


def test_a_tensor_without_a_use_is_refused_with_the_shard_that_holds_it(tmp_path: Path) -> None:
    make_reference("llama").save_pretrained(tmp_path, max_shard_size="50KB")
    index = tmp_path / "model.safetensors.index.json"
    placed = json.loads(index.read_text())["weight_map"]
    shard = placed["model.norm.weight"]
    save_file({**load_file(tmp_path / shard), "more": torch.zeros(1)}, tmp_path / shard)
    index.write_text(json.dumps({"weight_map": {**placed, "more": shard}}))
    with pytest.raises(ModelError, match=rf"{re.escape(shard)}, tensor more: .* no use"):
        load(folder_files(tmp_path))


def test_settings_of_a_deeper_model_are_refused(tmp_path: Path) -> None:
    make_reference("llama", tmp_path)
    edit_config(tmp_path, num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"tensor model\.layers\.2\."):
        load(folder_files(tmp_path))


def test_saved_rotary_frequencies_are_left_aside(tmp_path: Path) -> None:
    model = make_reference("llama", tmp_path)
    edit_tensors(tmp_path, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    prompt = random_tokens(5)
    found = PagedDecoder(load_exact(folder_files(tmp_path))).run("a", prompt)
    torch.testing.assert_close(found, reference_logits(model, prompt), atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_a_saved_head_counts_where_it_differs_from_the_embedding_it_is_tied_to(model_type: str, tmp_path: Path) -> None:
    make_reference(model_type, tmp_path, tie_word_embeddings=True)
    head = 0.1 * torch.randn(97, 64, generator=torch.Generator().manual_seed(1))
    edit_tensors(tmp_path, {"lm_head.weight": head})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    prompt = random_tokens(5)
    found = PagedDecoder(load_exact(folder_files(tmp_path))).run("a", prompt)
    torch.testing.assert_close(found, reference_logits(model, prompt), atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_saved_head_that_equals_the_embedding_is_tied_to_it(dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_reference("llama", tmp_path, tie_word_embeddings=True)
    edit_tensors(tmp_path, {"lm_head.weight": model.lm_head.weight.data.to(dtype, copy=True)})
    decoder = load_exact(folder_files(tmp_path))
    assert decoder.lm_head.weight.weight.data_ptr() == decoder.embedding.weight.data_ptr()  # type: ignore[attr-defined]


def test_a_tied_head_shares_the_memory_of_the_embedding(tmp_path: Path) -> None:
    make_reference("llama", tmp_path, tie_word_embeddings=True)
    decoder = load_exact(folder_files(tmp_path))
    head = decoder.lm_head.weight
    assert isinstance(head, DenseWeight)
    assert head.weight.data_ptr() == decoder.embedding.weight.data_ptr()  # type: ignore[attr-defined]


def save_a_model_that_also_sees(folder: Path) -> Gemma3ForConditionalGeneration:
    text = {**SIZES, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 7}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    model = Gemma3ForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        fill(name, parameter.data)
    model.save_pretrained(folder)
    return model


def test_the_text_part_of_a_model_that_also_sees_is_loaded(tmp_path: Path) -> None:
    model = save_a_model_that_also_sees(tmp_path)
    prompt = random_tokens(20)
    found = PagedDecoder(load_exact(folder_files(tmp_path))).run("a", prompt)
    torch.testing.assert_close(found, reference_logits(model, prompt), atol=1e-4, rtol=0.0)


def test_the_head_of_a_model_that_also_sees_counts_under_its_older_name(tmp_path: Path) -> None:
    model = save_a_model_that_also_sees(tmp_path)
    head = 0.1 * torch.randn(97, 64, generator=torch.Generator().manual_seed(1))
    edit_tensors(tmp_path, {"language_model.lm_head.weight": head})
    model.lm_head.weight = torch.nn.Parameter(head)
    prompt = random_tokens(5)
    found = PagedDecoder(load_exact(folder_files(tmp_path))).run("a", prompt)
    torch.testing.assert_close(found, reference_logits(model, prompt), atol=1e-4, rtol=0.0)


def test_sharded_files_give_the_same_logits(tmp_path: Path) -> None:
    model = make_reference("llama")
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    prompt = random_tokens(12)
    found = PagedDecoder(load_exact(folder_files(tmp_path))).run("a", prompt)
    torch.testing.assert_close(found, reference_logits(model, prompt), atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("precision", ["exact", "float32"])
def test_exact_precision_is_float32_whatever_dtype_is_asked_for(precision: str, tmp_path: Path) -> None:
    write_gguf(make_reference("llama"), tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q4_1)
    decoder = load(ModelFiles("tiny", "gguf", tmp_path / "tiny.gguf"), dtype=torch.bfloat16, precision=precision)
    assert decoder.dtype == torch.float32
    for layer in decoder.layers:
        weight = layer.attention.qkv.weight
        assert isinstance(weight, DenseWeight)
        assert weight.weight.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 falls back, and says so
def test_bfloat16_follows_the_reference_as_far_as_bfloat16_can(tmp_path: Path) -> None:
    model = make_reference("gemma3_text", tmp_path, head_dim=16, query_pre_attn_scalar=16)
    decoder = load(folder_files(tmp_path), dtype=torch.bfloat16, precision="bfloat16")
    prompt = random_tokens(20)
    found = PagedDecoder(decoder).run("a", prompt)
    expected = reference_logits(model, prompt)
    assert found.dtype == torch.float32  # the products' sums are not rounded
    assert (found - expected).abs().mean() < 0.03 * expected.std()


def test_an_embedding_that_stays_quantised_looks_up_the_same_rows(tmp_path: Path) -> None:
    write_gguf(make_reference("llama"), tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)
    files = ModelFiles("tiny", "gguf", tmp_path / "tiny.gguf")
    kept, dense = load(files, precision="auto").embedding, load_exact(files).embedding
    tokens = torch.tensor(random_tokens(9))
    assert kept.num_bytes < dense.num_bytes / 3
    torch.testing.assert_close(kept.look_up(tokens), dense.look_up(tokens), atol=0.0, rtol=0.0)


def test_progress_ends_at_the_size_of_the_file(tmp_path: Path) -> None:
    make_reference("phi3", tmp_path)
    told: list[tuple[int, int | None]] = []
    load(folder_files(tmp_path), progress=lambda done, total, name: told.append((done, total)))
    assert told[-1][0] == told[-1][1]
    assert told == sorted(told)


def test_random_weights_serve_a_bare_config(tmp_path: Path) -> None:
    make_reference("qwen3", tmp_path, head_dim=16)
    (tmp_path / "model.safetensors").unlink()
    files = ModelFiles("tiny", "folder", tmp_path, tmp_path / "config.json", load_format="dummy")
    logits = PagedDecoder(load(files)).run("a", random_tokens(8))
    assert logits.isfinite().all()


def test_pairs_that_rotate_together_become_neighbours() -> None:
    assert pair_order(2, 8, 4).tolist() == [0, 2, 1, 3, 4, 5, 6, 7, 8, 10, 9, 11, 12, 13, 14, 15]


@pytest.fixture
def quantised(tmp_path: Path) -> StoredTensor:
    """A matrix of two Q8_0 blocks a row."""
    write_gguf(make_reference("llama"), tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)
    return GgufSource(GgufFile.open(tmp_path / "tiny.gguf")).get("blk.0.attn_q.weight", (64, 64))


def test_columns_are_cut_between_blocks(quantised: StoredTensor) -> None:
    torch.testing.assert_close(column_range(quantised, 32, 64).dense(), quantised.dense()[:, 32:], atol=0.0, rtol=0.0)


def test_columns_are_never_cut_within_a_block(quantised: StoredTensor) -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel: 4 .* Q8_0 blocks of blk\.0\.attn_q\.weight"):
        column_range(quantised, 16, 32)
