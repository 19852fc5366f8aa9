"""The default model on a CUDA device in bfloat16, against float32 on the CPU."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock import LLM, SamplingParams
from penstock.kernels.attention.cpu import CpuAttention
from penstock.kernels.attention.interface import AttentionBackend
from penstock.kernels.attention.triton_paged import TritonPagedAttention
from penstock.models.decoder import Decoder
from penstock.models.loader import load_model
from penstock.models.registry import spec_for
from penstock.models.store import ModelFiles
from tests.paged import PagedDecoder
from tests.transformers_reference import load_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

NUM_PROMPTS, NUM_TOKENS = 40, 48
SUBJECTS = ["the sea", "prime numbers", "bread", "the moon", "trains", "honey bees", "glass", "rivers", "clocks", "tea"]
FRAMES = [
    "Write a short story about {}.\n",
    "Q: What should a child know about {}?\nA:",
    "def describe():\n    # returns a sentence about {}\n    return",
    "<|im_start|>user\nGive me three facts about {}.<|im_end|>\n<|im_start|>assistant\n",
]
PROMPTS = [frame.format(subject) for frame in FRAMES for subject in SUBJECTS]


def load(path: Path, device: str) -> Decoder:
    files = ModelFiles("default", "gguf", path)
    exact = device == "cpu"
    return load_model(
        files,
        spec_for(files),
        device=torch.device(device),
        dtype=torch.float32 if exact else torch.bfloat16,
        precision="exact" if exact else "bfloat16",
        context_tokens=1024,
    )


def paged(decoder: Decoder, device: str) -> PagedDecoder:
    backend: type[AttentionBackend] = CpuAttention if device == "cpu" else TritonPagedAttention
    return PagedDecoder(decoder, num_blocks=4096, block_tokens=16, backend=backend, device=device)


@pytest.fixture(scope="module")
def on_cpu(default_model_path: Path) -> PagedDecoder:
    return paged(load(default_model_path, "cpu"), "cpu")


@pytest.fixture(scope="module")
def on_cuda(default_model_path: Path) -> PagedDecoder:
    return paged(load(default_model_path, "cuda"), "cuda")


@pytest.fixture(scope="module")
def greedy(default_model_path: Path) -> list[tuple[list[int], list[int]]]:
    """Prompts, and what the exact engine on the CPU answers."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with LLM(str(default_model_path), device="cpu", precision="exact", kv_memory="1GiB") as llm:
        prompts = [llm.tokenizer.encode(text, add_special=False) for text in PROMPTS]
        return [
            (prompt, answer.token_ids) for prompt, answer in zip(prompts, llm.generate(prompts, params), strict=True)
        ]


def relative_error(found: Tensor, expected: Tensor) -> float:
    expected = expected.double().cpu()
    return float((found.double().cpu() - expected).norm() / expected.norm())


def one_layer(model: PagedDecoder, index: int, x: Tensor, positions: Tensor) -> Tensor:
    """What the residual stream x becomes in one layer; the backend must be prepared."""
    decoder = model.decoder
    rotations = [rope.rotations(positions) for rope in decoder.ropes]
    update, residual = decoder.layers[index].forward(None, x.clone(), rotations, model.backend)
    return residual if update is None else residual + update


@torch.inference_mode()
def test_every_layer_is_within_a_hundredth_of_float32(
    on_cpu: PagedDecoder, on_cuda: PagedDecoder, greedy: list[tuple[list[int], list[int]]]
) -> None:
    tokens = (greedy[0][0] + greedy[0][1])[:64]
    on_cpu.run("layers", tokens)  # leaves both backends prepared for these tokens
    on_cuda.run("layers", tokens)
    positions = torch.arange(len(tokens))
    x = on_cpu.decoder.embedding.look_up(torch.tensor(tokens))
    for index in range(len(on_cpu.decoder.layers)):
        expected = one_layer(on_cpu, index, x, positions)
        found = one_layer(on_cuda, index, x.to("cuda", torch.bfloat16), positions.cuda())
        assert relative_error(found, expected) <= 1e-2, f"layer {index}"
        x = expected


@torch.inference_mode()
def test_logits_of_a_state_are_within_a_hundredth_of_float32(
    on_cpu: PagedDecoder, on_cuda: PagedDecoder, greedy: list[tuple[list[int], list[int]]]
) -> None:
    tokens = greedy[0][0] + greedy[0][1]
    on_cpu.run("head", tokens)
    states = on_cpu.decoder.forward(torch.tensor(tokens), torch.arange(len(tokens)), on_cpu.backend)
    expected = on_cpu.decoder.logits(states)
    for rows in (1, 9, len(tokens)):
        found = on_cuda.decoder.logits(states[:rows].to("cuda", torch.bfloat16))
        assert found.dtype == torch.float32
        assert relative_error(found, expected[:rows]) <= 1e-2


@torch.inference_mode()
def test_the_whole_model_is_as_close_to_float32_as_transformers_in_bfloat16(
    default_model_path: Path, on_cpu: PagedDecoder, on_cuda: PagedDecoder, greedy: list[tuple[list[int], list[int]]]
) -> None:
    theirs = load_reference(default_model_path).to("cuda", torch.bfloat16)
    our_error = their_error = 0.0
    for number, (prompt, answer) in enumerate(greedy[::8]):
        tokens = prompt + answer
        expected = on_cpu.run(f"whole {number}", tokens)
        our_error += relative_error(on_cuda.run(f"whole {number}", tokens), expected)
        their_error += relative_error(theirs(torch.tensor([tokens], device="cuda")).logits[0], expected)
    print(
        f"relative error of the logits, summed over {len(greedy[::8])}: {our_error:.4f}, transformers {their_error:.4f}"
    )
    assert our_error <= 1.05 * their_error


def test_greedy_tokens_agree_with_the_exact_engine(
    on_cuda: PagedDecoder, greedy: list[tuple[list[int], list[int]]]
) -> None:
    assert len(greedy) == NUM_PROMPTS
    same = total = 0
    for number, (prompt, answer) in enumerate(greedy):
        logits = on_cuda.run(f"greedy {number}", prompt + answer[:-1])
        drawn = logits[len(prompt) - 1 :].argmax(-1).tolist()
        same += sum(ours == theirs for ours, theirs in zip(drawn, answer, strict=True))
        total += len(answer)
    print(f"greedy agreement: {same} of {total}")
    assert same / total >= 0.98
