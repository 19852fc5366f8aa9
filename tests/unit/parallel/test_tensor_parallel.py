"""Two ranks that split a model's layers give the logits of the whole model."""

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.models.store import ModelFiles
from penstock.parallel.groups import Group
from tests.gguf_models import write_gguf
from tests.paged import PagedDecoder
from tests.tiny_models import folder_files, load_exact, make_reference, reference_logits
from tests.unit.parallel.rank import TOKEN_IDS

REPOSITORY = Path(__file__).parents[3]

MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "even-vocabulary": ("llama", {"vocab_size": 96}),
    "one-kv-head": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qk-norm": ("qwen3", {"head_dim": 16}),
    "fused": ("phi3", {}),
    "softcaps": ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 7}),
    "experts": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
QUANTISED = "quantised.gguf"


@pytest.fixture(scope="module")
def expected_and_found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tensor, list[Tensor]]]:
    """By model: the logits of the whole model, and those of each rank. Two processes serve all models."""
    folder = tmp_path_factory.mktemp("ranks")
    expected = {}
    for name, (model_type, config) in MODELS.items():
        expected[name] = reference_logits(make_reference(model_type, folder / name, **config), TOKEN_IDS)
    quantised = make_reference("llama", hidden_size=128, intermediate_size=128, num_attention_heads=4)
    write_gguf(quantised, folder / QUANTISED, gguf.GGMLQuantizationType.Q4_1)
    whole = load_exact(ModelFiles("tiny", "gguf", folder / QUANTISED))
    expected[QUANTISED] = PagedDecoder(whole).run("a", TOKEN_IDS)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.unit.parallel.rank", str(rank), "2", str(folder / "rendezvous"), str(folder)]
            + [str(folder / name) for name in expected],
            cwd=REPOSITORY,
        )
        for rank in range(2)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    return {
        name: (logits, [torch.from_numpy(np.load(folder / f"{name}-{rank}.npy")) for rank in range(2)])
        for name, logits in expected.items()
    }


@pytest.mark.parametrize("name", [*MODELS, QUANTISED])
def test_two_ranks_give_the_logits_of_the_whole_model(
    name: str, expected_and_found: dict[str, tuple[Tensor, list[Tensor]]]
) -> None:
    expected, found = expected_and_found[name]
    for of_rank in found:
        torch.testing.assert_close(of_rank, expected, atol=1e-4, rtol=0.0)


def test_a_rank_holds_half_of_each_matrix(tmp_path: Path) -> None:
    make_reference("llama", tmp_path)
    whole = load_exact(folder_files(tmp_path)).layers[0].attention
    half = load_exact(folder_files(tmp_path), group=Group(1, 2)).layers[0].attention
    assert half.qkv.weight.num_bytes * 2 == whole.qkv.weight.num_bytes
    assert half.output.weight.num_bytes * 2 == whole.output.weight.num_bytes
