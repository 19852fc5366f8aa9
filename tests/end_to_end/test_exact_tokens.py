"""The default model in exact mode: transformers' tokens, whatever the batch, the chunks, the cache and the pressure."""

import dataclasses
import time

import pytest
import torch

from penstock.config import gather
from penstock.engine.builder import assemble
from penstock.engine.config import resolve
from penstock.engine.messages import Submit
from penstock.engine.runner.device import probe
from penstock.engine.runner.torch_device import make_runner
from penstock.engine.tokenizer import Tokenizer
from penstock.models.loader import load_model
from penstock.models.registry import spec_for
from penstock.models.store import ModelFiles
from penstock.request import SamplingParams
from tests.transformers_reference import load_reference

NUM_TOKENS = 64
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
SHORT = SamplingParams(max_tokens=24, temperature=0.0)
# Where the two best logits are closer than this, either token is right.
TIE = 0.01

SUBJECTS = [
    "the sea", "prime numbers", "bread", "the moon", "trains", "honey bees", "glass", "rivers", "clocks", "tea",
]  # fmt: skip
FRAMES = [
    "Write a short story about {}.\n",
    "Q: What should a child know about {}?\nA:",
    "def describe():\n    # returns a sentence about {}\n    return",
    "<|im_start|>user\nGive me three facts about {}.<|im_end|>\n<|im_start|>assistant\n",
]
PROMPTS = [frame.format(subject) for frame in FRAMES for subject in SUBJECTS]


@dataclasses.dataclass
class Exact:
    config: object
    spec: object
    model: object
    prompts: list[list[int]]
    reference: list[list[int]]  # our tokens from one large batch


@pytest.fixture(scope="module")
def exact(default_model_path):
    files = ModelFiles("default", "gguf", default_model_path)
    spec = spec_for(files)
    sourced = gather({"precision": "exact", "kv_memory": "1GiB", "max_running": 16}, environ={})
    config, _ = resolve(sourced, spec, probe("cpu", spec))
    torch.set_num_threads(config.threads)
    model = load_model(
        files, spec, device=torch.device("cpu"), dtype=torch.float32, precision="exact", context_tokens=512
    )
    tokenizer = Tokenizer.load(files)
    prompts = [tokenizer.encode(text, add_special=False) for text in PROMPTS]
    loaded = Exact(dataclasses.replace(config, max_context_tokens=512), spec, model, prompts, [])
    loaded.reference = run(loaded, prompts)
    return loaded


def engine_of(loaded, **changes):
    config = dataclasses.replace(loaded.config, **changes)
    return assemble(config, loaded.spec, make_runner(config, loaded.spec, loaded.model))


def run(loaded, prompts, *, engine=None, params=GREEDY, **changes):
    engine = engine or engine_of(loaded, **changes)
    tokens = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        engine.submit(Submit(request_id=str(index), prompt=prompt, params=params, arrival=time.monotonic()))
    while engine.has_work:
        for _, event in engine.step():
            assert event.error is None
            tokens[int(event.request_id)] += event.token_ids
    return tokens


@pytest.fixture(scope="module")
def transformers_model(default_model_path):
    return load_reference(default_model_path)


def test_greedy_tokens_equal_transformers_on_forty_prompts(exact, transformers_model):
    assert len(exact.prompts) == 40
    num_compared = 0
    for prompt, tokens in zip(exact.prompts, exact.reference, strict=True):
        with torch.inference_mode():
            logits = transformers_model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2, dim=-1)
        for step, token in enumerate(tokens):
            if best.values[step, 0] - best.values[step, 1] < TIE:
                break
            assert token == best.indices[step, 0]
            num_compared += 1
    assert num_compared > 40 * NUM_TOKENS // 2, "most steps are no ties"


def test_prompts_are_scored_as_transformers_scores_them(exact, transformers_model):
    prompts, num_top = exact.prompts[::9], 5
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=num_top)
    engine = engine_of(exact, max_step_tokens=16)
    for index, prompt in enumerate(prompts):
        engine.submit(Submit(request_id=str(index), prompt=prompt, params=params, arrival=time.monotonic()))
    told = {}
    while engine.has_work:
        told |= {int(event.request_id): event.prompt_logprobs for _, event in engine.step()}
    for index, prompt in enumerate(prompts):
        with torch.inference_mode():
            logits = transformers_model(torch.tensor([prompt])).logits[0, :-1]
        expected = torch.log_softmax(logits, dim=-1)
        scores = told[index].read(0, prompt[1:])
        own = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert [score.logprob for score in scores] == pytest.approx(own.tolist(), abs=2e-3)
        for score, best in zip(scores, expected.topk(num_top).values.tolist(), strict=True):
            assert score.top_logprobs == pytest.approx(best, abs=2e-3)


@pytest.mark.parametrize("changes", [{"max_running": 1}, {"max_running": 5}, {"max_step_tokens": 16}])
def test_batch_and_chunk_sizes_change_no_token(exact, changes):
    found = run(exact, exact.prompts[::8], params=SHORT, **changes)
    assert found == [tokens[: SHORT.max_tokens] for tokens in exact.reference[::8]]


def test_a_cache_too_small_for_the_load_changes_no_token(exact):
    changes = {"num_blocks": 9, "max_context_tokens": 128, "max_running": 16, "max_step_tokens": 64}
    engine = engine_of(exact, **changes)
    engine.scheduler.placement.lengths.mean_tokens = 0.0
    found = run(exact, exact.prompts[::4], engine=engine, params=SHORT)
    assert found == [tokens[: SHORT.max_tokens] for tokens in exact.reference[::4]]
    assert engine.metrics.num_preemptions > 0


def test_a_prefix_hit_changes_no_token(exact):
    engine = engine_of(exact)
    prompts = [exact.prompts[30] + exact.prompts[index] for index in (1, 11, 21)]
    first = run(exact, prompts[:1], engine=engine, params=SHORT) + run(exact, prompts[1:], engine=engine, params=SHORT)
    again = run(exact, prompts, engine=engine, params=SHORT)
    assert engine.metrics.prefix_hit_tokens > 0
    assert again == first
    assert run(exact, prompts, params=SHORT, prefix_cache=False) == first


def test_a_seed_gives_the_same_sample_alone_in_a_batch_and_on_a_prefix_hit(exact):
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=7)
    prompts = [exact.prompts[30] + exact.prompts[index] for index in (1, 11, 21)]
    alone = [run(exact, [prompt], params=params)[0] for prompt in prompts]
    engine = engine_of(exact)
    assert run(exact, prompts, engine=engine, params=params) == alone
    assert run(exact, prompts, engine=engine, params=params) == alone
    assert engine.metrics.prefix_hit_tokens > 0
