"""Every family gives the reference's logits: whole prompts, chunks of them, single tokens and mixed batches."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.models.decoder import Decoder
from tests.paged import PagedDecoder
from tests.tiny_models import folder_files, load_exact, make_reference, random_tokens, reference_logits

TOLERANCE = 1e-4
PROMPT_TOKENS = 27


@dataclass(frozen=True)
class Case:
    model_type: str
    config: dict[str, object] = field(default_factory=dict)
    context_tokens: int | None = None


def rope(rope_type: str, **parameters: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10_000.0, **parameters}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16)
LONGROPE = rope(
    "longrope",
    short_factor=[1.0 + 0.1 * number for number in range(8)],
    long_factor=[2.0 + 0.5 * number for number in range(8)],
)
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 7}

CASES = {
    "llama": Case("llama"),
    "llama-partial": Case("llama", rope("default", partial_rotary_factor=0.5)),
    "llama-one-kv-head": Case("llama", {"num_key_value_heads": 1}),
    "llama-tied": Case("llama", {"tie_word_embeddings": True}),
    "llama-biases": Case("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": Case("llama", {"head_dim": 24}),
    "llama-linear": Case("llama", rope("linear", factor=3.0)),
    "llama-dynamic": Case("llama", rope("dynamic", factor=2.0)),
    "llama-dynamic-stretched": Case(
        "llama", {**rope("dynamic", factor=2.0), "max_position_embeddings": 16}, context_tokens=PROMPT_TOKENS
    ),
    "llama-llama3": Case("llama", LLAMA3),
    "llama-yarn": Case("llama", YARN),
    "llama-yarn-mscale": Case(
        "llama",
        rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=0.3, truncate=False),
    ),
    "llama-yarn-attention-factor": Case(
        "llama",
        rope(
            "yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=0.8, beta_fast=8.0, beta_slow=2.0
        ),
    ),
    "mistral-window": Case("mistral", {"sliding_window": 6}),
    "mistral-full": Case("mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": Case("qwen2"),
    "qwen2-yarn-tied": Case("qwen2", {**YARN, "tie_word_embeddings": True}),
    "qwen2-window-above": Case(
        "qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 3}
    ),
    "qwen3": Case("qwen3", {"head_dim": 24}),
    "qwen3-yarn-biases": Case("qwen3", {**YARN, "head_dim": 16, "attention_bias": True}),
    "gemma2": Case("gemma2", {**GEMMA, "num_hidden_layers": 3}),
    "gemma2-hard-caps": Case(
        "gemma2", {**GEMMA, "head_dim": 32, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    ),
    "gemma3": Case("gemma3_text", {**GEMMA, "num_hidden_layers": 4, "sliding_window_pattern": 3}),
    "gemma3-caps": Case("gemma3_text", {**GEMMA, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 3.0}),
    "gemma3-linear": Case(
        "gemma3_text",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "phi3": Case("phi3"),
    "phi3-window": Case("phi3", {"sliding_window": 9}),
    "phi3-partial": Case("phi3", {**rope("default", partial_rotary_factor=0.5)}),
    "phi3-longrope-short": Case(
        "phi3", {**LONGROPE, "original_max_position_embeddings": 32}, context_tokens=PROMPT_TOKENS
    ),
    "phi3-longrope-long": Case("phi3", {**LONGROPE, "original_max_position_embeddings": 16}),
    "mixtral": Case("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-window": Case("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 6}),
    "qwen3_moe": Case(
        "qwen3_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "head_dim": 24,
        },
    ),
    "qwen3_moe-some-layers-dense": Case(
        "qwen3_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": False,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "head_dim": 16,
        },
    ),
}


@dataclass(frozen=True)
class Pair:
    reference: PreTrainedModel
    decoder: Decoder


Pairs = Callable[[str], Pair]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """Make each case's models once for all tests of it."""
    made: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in made:
            folder: Path = tmp_path_factory.mktemp(name)
            reference = make_reference(CASES[name].model_type, folder, **CASES[name].config)
            made[name] = Pair(reference, load_exact(folder_files(folder), CASES[name].context_tokens))
        return made[name]

    return get


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0.0)


@pytest.mark.parametrize("name", CASES)
def test_a_whole_prompt_gives_the_logits_of_the_reference(name: str, pairs: Pairs) -> None:
    pair = pairs(name)
    prompt = random_tokens(PROMPT_TOKENS)
    expected = reference_logits(pair.reference, prompt)
    assert expected.std() > 0.2  # or a mistake could hide below the tolerance
    assert_close(PagedDecoder(pair.decoder).run("a", prompt), expected)


@pytest.mark.parametrize("chunk", [1, 5, 16])
@pytest.mark.parametrize("name", CASES)
def test_a_prompt_in_chunks_gives_the_logits_of_the_reference(name: str, chunk: int, pairs: Pairs) -> None:
    pair = pairs(name)
    prompt = random_tokens(PROMPT_TOKENS, seed=1)
    assert_close(PagedDecoder(pair.decoder).run("a", prompt, chunk), reference_logits(pair.reference, prompt))


@pytest.mark.parametrize("name", CASES)
def test_requests_packed_in_one_step_do_not_see_each_other(name: str, pairs: Pairs) -> None:
    pair = pairs(name)
    # All longer than the trained length of the cases with a length-dependent rope, where the reference follows it.
    prompts = {"a": random_tokens(PROMPT_TOKENS, 2), "b": random_tokens(PROMPT_TOKENS, 3), "c": random_tokens(22, 4)}
    paged = PagedDecoder(pair.decoder)
    found: dict[str, list[Tensor]] = {request: [] for request in prompts}
    for step in ({"a": 10}, {"b": 3, "a": 1}, {"a": 1, "b": 1, "c": 20}, {"c": 1, "b": 9, "a": 15}, {"b": 14, "c": 1}):
        taken = {request: sum(map(len, found[request])) for request in step}
        slices = [(request, prompts[request][taken[request] : taken[request] + step[request]]) for request in step]
        for (request, _), logits in zip(slices, paged.step(*slices), strict=True):
            found[request].append(logits)
    for request, prompt in prompts.items():
        assert_close(torch.cat(found[request]), reference_logits(pair.reference, prompt))
