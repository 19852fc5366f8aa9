"""Prompt tokens' log-probabilities are transformers', however the prompt was run, and cost nobody else anything."""

import dataclasses
import time
from array import array

import pytest
import torch

from penstock.config import gather
from penstock.engine.config import resolve
from penstock.engine.messages import Events, PromptLogprobs, Submit, TokenEvent, decode_from_engine, encode
from penstock.engine.runner.device import probe
from penstock.models.registry import spec_for
from penstock.request import SamplingParams
from tests.tiny_engine import LoadedModel, engine_of
from tests.tiny_models import folder_files, load_exact, make_reference, random_tokens, reference_logits

NUM_TOP = 3
PROMPTS = [random_tokens(60, seed=1), random_tokens(33, seed=2), random_tokens(60, seed=3), [5]]


@dataclasses.dataclass
class Tiny:
    loaded: LoadedModel
    expected: list[torch.Tensor]  # log-probabilities behind each position of each prompt


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    reference = make_reference("llama", folder, max_position_embeddings=512)
    files = folder_files(folder)
    spec = spec_for(files)
    config, _ = resolve(gather({"precision": "exact", "kv_memory": "1MiB"}, environ={}), spec, probe("cpu", spec))
    loaded = LoadedModel(config, spec, load_exact(files))
    return Tiny(loaded, [torch.log_softmax(reference_logits(reference, prompt), dim=-1) for prompt in PROMPTS])


def scoring(max_tokens=1, num_top=NUM_TOP):
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, prompt_logprobs=num_top)


def run(engine, prompts, params):
    """Return what is told of each prompt, which is told once, and with the first token."""
    told, begun = {}, set()
    for index, prompt in enumerate(prompts):
        engine.submit(Submit(request_id=str(index), prompt=prompt, params=params, arrival=time.monotonic()))
    while engine.has_work:
        for _, event in engine.step():
            assert event.error is None
            assert (event.prompt_logprobs is not None) == (event.request_id not in begun)
            begun.add(event.request_id)
            if event.prompt_logprobs is not None:
                told[int(event.request_id)] = event.prompt_logprobs
    engine.runner.close()
    return [told[index] for index in range(len(prompts))]


def check(told, expected, prompt):
    assert told.num_tokens == len(prompt) - 1
    for place, (score, row) in enumerate(zip(told.read(0, prompt[1:]), expected, strict=False)):
        assert score.token_id == prompt[place + 1]
        assert score.logprob == pytest.approx(float(row[score.token_id]), abs=1e-4)
        best = row.topk(NUM_TOP)
        assert score.top_ids == best.indices.tolist()
        assert score.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_running": 1, "max_step_tokens": 512},
        {"max_running": 4, "max_step_tokens": 512},
        {"max_running": 4, "max_step_tokens": 7},
        {"max_running": 3, "max_step_tokens": 3, "speculative": "ngram"},
    ],
)
def test_they_are_those_of_transformers_in_any_batch_and_chunks(tiny, changes):
    found = run(engine_of(tiny.loaded, **changes), PROMPTS, scoring(max_tokens=3))
    for told, expected, prompt in zip(found, tiny.expected, PROMPTS, strict=True):
        check(told, expected, prompt)


@pytest.mark.parametrize("max_step_tokens", [7, 512])
def test_a_prompt_that_fills_the_context_is_scored(tiny, max_step_tokens):
    engine = engine_of(tiny.loaded, max_context_tokens=60, max_running=4, max_step_tokens=max_step_tokens)
    (told,) = run(engine, PROMPTS[:1], scoring())
    check(told, tiny.expected[0], PROMPTS[0])


def test_a_cached_prompt_is_run_again_to_be_scored(tiny):
    engine = engine_of(tiny.loaded)
    plain = SamplingParams(max_tokens=1, temperature=0.0)
    engine.submit(Submit(request_id="warm", prompt=PROMPTS[0], params=plain, arrival=time.monotonic()))
    while engine.has_work:
        engine.step()
    (told,) = run(engine, PROMPTS[:1], scoring())
    check(told, tiny.expected[0], PROMPTS[0])
    assert engine.metrics.prefix_hit_tokens == 0


@pytest.mark.parametrize("max_step_tokens", [6, 8, 64])
def test_a_preempted_prompt_is_scored_where_it_was_and_goes_on_like_any_other(tiny, max_step_tokens):
    prompts = [PROMPTS[0], PROMPTS[2]] * 3
    engine = engine_of(
        tiny.loaded, max_running=6, max_step_tokens=max_step_tokens, num_blocks=9, max_context_tokens=112
    )
    engine.scheduler.placement.lengths.mean_tokens = 0.0
    found = run(engine, prompts, scoring(max_tokens=40))
    assert engine.metrics.num_preemptions > 0
    for index, told in enumerate(found):
        check(told, tiny.expected[(0, 2)[index % 2]], prompts[index])
    # What was told once needs no running of cached tokens any more.
    assert max_step_tokens < 64 or engine.metrics.prefix_hit_tokens > 0


def test_only_prompts_that_are_scored_have_logits_and_never_many_at_once(tiny, monkeypatch):
    model, sizes = tiny.loaded.model, []
    logits = type(model).logits
    monkeypatch.setattr(type(model), "logits", lambda self, hidden: sizes.append(len(hidden)) or logits(self, hidden))
    engine = engine_of(tiny.loaded, max_running=2, max_step_tokens=512)
    for name, length, params in (("plain", 60, SamplingParams(max_tokens=1)), ("scored", 300, scoring())):
        engine.submit(Submit(request_id=name, prompt=random_tokens(length), params=params, arrival=time.monotonic()))
    while engine.has_work:
        engine.step()
    engine.runner.close()
    assert sizes == [128, 128, 43, 2]


@pytest.mark.parametrize("num_top", [0, 2])
def test_they_are_joined_cut_and_sent_packed(num_top):
    def made(places):
        ids = [10 * place + rank for place in places for rank in range(num_top)]
        best = array("f", [-value / 4 for value in ids])
        own = array("f", [-place / 2 for place in places])
        return PromptLogprobs(own.tobytes(), num_top, array("i", ids).tobytes(), best.tobytes())

    whole = made(range(6))
    assert PromptLogprobs.joined([made(range(2)), made([]), made(range(2, 6))]) == whole
    assert whole.behind(4) == made([4, 5])
    assert whole.behind(6).num_tokens == 0
    assert PromptLogprobs.joined([]).num_tokens == 0
    (score, _) = whole.read(4, [7, 8])
    assert (score.token_id, score.logprob) == (7, -2.0)
    assert score.top == [(40, -10.0), (41, -10.25)][:num_top]
    frame = encode(Events([TokenEvent(request_id="a", prompt_logprobs=whole)]))
    assert decode_from_engine(frame).events[0].prompt_logprobs == whole
