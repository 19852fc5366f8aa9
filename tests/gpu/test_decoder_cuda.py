"""The decoder on a CUDA device: the logits of the CPU, and nothing in a step that a graph could not capture."""

from pathlib import Path

import pytest
import torch

from penstock.kernels.attention.interface import AttentionStep
from penstock.models.decoder import Decoder
from penstock.models.loader import load_model
from penstock.models.registry import spec_for
from tests.paged import PagedDecoder
from tests.tiny_models import folder_files, load_exact, make_reference, random_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {"attention_bias": True}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 7}),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
}


def load_on_cuda(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    files = folder_files(folder)
    precision = str(dtype).removeprefix("torch.")
    return load_model(files, spec_for(files), device=torch.device("cuda"), dtype=dtype, precision=precision)


@pytest.mark.parametrize("name", MODELS)
def test_float32_gives_the_logits_of_the_cpu(name: str, tmp_path: Path) -> None:
    make_reference(MODELS[name][0], tmp_path, **MODELS[name][1])
    prompt = random_tokens(27)
    expected = PagedDecoder(load_exact(folder_files(tmp_path))).run("a", prompt)
    found = PagedDecoder(load_on_cuda(tmp_path), device="cuda").run("a", prompt, 5)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-3, rtol=0.0)


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_stays_near_float32(name: str, tmp_path: Path) -> None:
    make_reference(MODELS[name][0], tmp_path, **MODELS[name][1])
    prompt = random_tokens(27)
    expected = PagedDecoder(load_exact(folder_files(tmp_path))).run("a", prompt)
    found = PagedDecoder(load_on_cuda(tmp_path, torch.bfloat16), device="cuda").run("a", prompt)
    assert (found.cpu() - expected).abs().mean() < 0.1 * expected.std()


@pytest.mark.parametrize("name", MODELS)
def test_a_captured_step_answers_for_the_tokens_it_is_replayed_with(name: str, tmp_path: Path) -> None:
    make_reference(MODELS[name][0], tmp_path, **MODELS[name][1])
    decoder = load_on_cuda(tmp_path)
    prompts = {"a": random_tokens(9, 1), "b": random_tokens(14, 2)}
    paged = PagedDecoder(decoder, device="cuda")
    for request, prompt in prompts.items():
        paged.run(request, prompt)
    paged.step(("a", [3]), ("b", [4]))  # leaves the backend prepared for a step of one token each
    step: AttentionStep = paged.backend.step  # type: ignore[attr-defined]
    token_ids = torch.tensor([3, 4], device="cuda")
    positions = torch.tensor(step.context_lens, device="cuda") - 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = decoder.logits(decoder.forward(token_ids, positions, paged.backend))
    token_ids.copy_(torch.tensor([31, 62]))
    graph.replay()
    expected = decoder.logits(decoder.forward(token_ids, positions, paged.backend))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0.0)
