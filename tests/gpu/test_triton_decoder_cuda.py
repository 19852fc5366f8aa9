"""Whole decoders through the Triton kernels: the logits of the CPU, for prompts whole, in chunks and token by token."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.models.loader import load_model
from penstock.models.registry import spec_for
from tests.paged import PagedDecoder
from tests.tiny_models import folder_files, load_exact, make_reference, random_tokens

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

from penstock.kernels.attention.triton_paged import TritonPagedAttention

pytestmark = pytest.mark.gpu

MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {"attention_bias": True}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 7}),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
}


@pytest.mark.parametrize("chunk", [None, 5, 1])
@pytest.mark.parametrize("name", MODELS)
def test_float32_gives_the_logits_of_the_cpu(name: str, chunk: int | None, tmp_path: Path) -> None:
    make_reference(MODELS[name][0], tmp_path, **MODELS[name][1])
    files = folder_files(tmp_path)
    prompt = random_tokens(27)
    expected = PagedDecoder(load_exact(files)).run("a", prompt)
    decoder = load_model(files, spec_for(files), device=torch.device("cuda"), dtype=torch.float32, precision="float32")
    found = PagedDecoder(decoder, backend=TritonPagedAttention, device="cuda").run("a", prompt, chunk)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-3, rtol=0.0)


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_logits_are_as_close_to_float32_as_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference = make_reference(MODELS[name][0], tmp_path, **MODELS[name][1])
    files = folder_files(tmp_path)
    # Weights that bfloat16 holds exactly, as checkpoints have them: what differs is the arithmetic.
    for tensor in tmp_path.glob("*.safetensors"):
        weights = {key: value.bfloat16().float() for key, value in load_file(tensor).items()}
        save_file(weights, tensor, metadata={"format": "pt"})
    exact = PagedDecoder(load_exact(files))
    decoder = load_model(
        files, spec_for(files), device=torch.device("cuda"), dtype=torch.bfloat16, precision="bfloat16"
    )
    ours = PagedDecoder(decoder, backend=TritonPagedAttention, device="cuda")
    theirs = reference.to("cuda", torch.bfloat16)
    our_errors, their_errors = [], []
    for seed in range(8):
        prompt = random_tokens(27, seed=seed)
        expected = exact.run(f"{seed}", prompt)
        our_errors.append(token_errors(ours.run(f"{seed}", prompt), expected))
        with torch.no_grad():
            their_errors.append(token_errors(theirs(torch.tensor([prompt], device="cuda")).logits[0], expected))
    # Experts that score nearly alike are picked either way, and the tokens that got others are far off.
    middle = torch.median if name == "qwen3_moe" else torch.mean
    our_error, their_error = float(middle(torch.cat(our_errors))), float(middle(torch.cat(their_errors)))
    print(f"{name}: relative error of a token's logits {our_error:.4f}, transformers {their_error:.4f}")
    assert our_error <= 1.05 * their_error


def token_errors(found: Tensor, expected: Tensor) -> Tensor:
    expected = expected.double().cpu()
    return (found.double().cpu() - expected).norm(dim=1) / expected.norm(dim=1)
