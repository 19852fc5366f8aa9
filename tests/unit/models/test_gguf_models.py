"""A model read from GGUF gives the logits of the model it was converted from."""

from pathlib import Path

import gguf
import pytest
import torch
from transformers import PreTrainedModel

from penstock.models.registry import spec_for
from penstock.models.store import ModelFiles
from tests.gguf_models import write_gguf
from tests.paged import PagedDecoder
from tests.tiny_models import load_exact, make_reference, random_tokens, reference_logits

TOLERANCE = 1e-4

MOE = {"num_experts_per_tok": 2, "num_local_experts": 4}
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "mixtral": ("mixtral", MOE),
    "qwen2": ("qwen2", {}),
    "qwen2-yarn": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3_moe": ("qwen3_moe", {**MOE, "head_dim": 16, "moe_intermediate_size": 32, "norm_topk_prob": True}),
    "gemma2": ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 7}),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 7, "num_hidden_layers": 7},
    ),
    "phi3": ("phi3", {}),
    "phi3-longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0 + 0.1 * number for number in range(8)],
                "long_factor": [2.0 + 0.5 * number for number in range(8)],
            },
        },
    ),
}


def gguf_files(path: Path) -> ModelFiles:
    return ModelFiles("tiny", "gguf", path)


@pytest.mark.parametrize("name", CASES)
def test_a_gguf_file_gives_the_logits_of_the_model_it_was_made_from(name: str, tmp_path: Path) -> None:
    model_type, config = CASES[name]
    model = make_reference(model_type, **config)
    write_gguf(model, tmp_path / "tiny.gguf")
    prompt = random_tokens(27)
    found = PagedDecoder(load_exact(gguf_files(tmp_path / "tiny.gguf"))).run("a", prompt, 10)
    torch.testing.assert_close(found, reference_logits(model, prompt), atol=TOLERANCE, rtol=0.0)


def round_to(model: PreTrainedModel, kind: gguf.GGMLQuantizationType) -> None:
    """Replace each matrix by what quantising makes of it."""
    for tensor in model.state_dict().values():
        if tensor.ndim > 1:
            rounded = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind)
            tensor.copy_(torch.from_numpy(rounded.reshape(tensor.shape)))


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "phi3", "mixtral"])
def test_rows_of_quantised_matrices_are_reordered_and_cut_without_loss(model_type: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    model = make_reference(model_type, **({**MOE} if model_type == "mixtral" else {}))
    write_gguf(model, tmp_path / "tiny.gguf", kind)
    round_to(model, kind)
    if model_type == "mixtral":  # its router is stored in float32
        state = make_reference(model_type, **MOE).state_dict()
        model.load_state_dict({name: state[name] for name in state if name.endswith("mlp.gate.weight")}, strict=False)
    prompt = random_tokens(20)
    found = PagedDecoder(load_exact(gguf_files(tmp_path / "tiny.gguf"))).run("a", prompt)
    torch.testing.assert_close(found, reference_logits(model, prompt), atol=TOLERANCE, rtol=0.0)


def test_a_llama_file_with_experts_is_read_as_mixtral(tmp_path: Path) -> None:
    write_gguf(make_reference("mixtral", **MOE), tmp_path / "tiny.gguf")
    spec = spec_for(gguf_files(tmp_path / "tiny.gguf"))
    assert spec.family == "mixtral"
    assert spec.moe is not None
    assert spec.moe.num_experts == 4


def test_end_and_begin_tokens_come_from_the_tokenizer_of_the_file(tmp_path: Path) -> None:
    write_gguf(make_reference("llama"), tmp_path / "tiny.gguf")
    spec = spec_for(gguf_files(tmp_path / "tiny.gguf"))
    assert spec.eos_token_ids == (2,)
    assert spec.bos_token_id == 1
