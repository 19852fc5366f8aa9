"""Captured steps with prompts, without a GPU: kernels in Triton's interpreter, and graphs that run their body again."""

import contextlib
import dataclasses
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.triton_device import DEVICE  # isort: skip

from penstock.engine.builder import assemble
from penstock.engine.messages import Submit
from penstock.engine.runner import mixed_graphs
from penstock.engine.runner.batch_rows import BatchRows
from penstock.engine.runner.kv_pool import KvPool
from penstock.engine.runner.mixed_graphs import MixedGraphs, token_counts
from penstock.engine.runner.model_runner import ModelRunner
from penstock.engine.runner.token_draw import TokenDraw
from penstock.engine.sampling.drawer import make_drawer
from penstock.engine.sampling.row_parameters import RowParameters
from penstock.engine.sampling.sampler import Sampler
from penstock.kernels.attention.triton_paged import TritonPagedAttention
from penstock.models.decoder import attention_layers
from penstock.request import SamplingParams
from tests.tiny_engine import engine_of, load_tiny

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="tests/gpu runs real graphs")

ROWS, STEP_TOKENS = 4, 16


class FakeStaging:
    def __init__(self, size):
        self.tensor = torch.zeros(size, dtype=torch.int64)

    @contextlib.contextmanager
    def slot(self):
        yield SimpleNamespace(tensor=self.tensor, values=self.tensor.numpy())


class NoTuner:
    """On a CPU there is nothing to try."""

    num_skipped = num_better = 0

    def allow(self, seconds):
        pass

    def save(self):
        pass


class FakeGraph:
    """Replays by running its body again: into the same memory, as far as anybody can tell."""

    def __init__(self, body, output):
        self._body, self._output = body, output

    def replay(self):
        self._output.copy_(self._body())


class HostAttention(TritonPagedAttention):
    """Also takes plain steps of a CPU, which come without the lengths that a device reads."""

    def prepare(self, step):
        if step.lens is None:
            lens = torch.tensor(step.context_lens, dtype=torch.int32)
            step = dataclasses.replace(step, lens=lens, starts=torch.tensor(step.query_starts, dtype=torch.int32))
        super().prepare(step)


@pytest.fixture
def captures(monkeypatch):
    """How many graphs were captured."""
    made = []

    def capture(body, stream, pool):
        output = body().clone()
        made.append(output)
        return FakeGraph(body, output), output

    monkeypatch.setattr(mixed_graphs, "capture", capture)
    monkeypatch.setattr(mixed_graphs, "StagingRing", FakeStaging)
    # Each token of a step, also of those that fill it up, takes the interpreter 20 ms a layer.
    monkeypatch.setattr(mixed_graphs, "token_counts", lambda most: [ROWS + 1, most])
    return made


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("tiny"), head_dim=16, num_attention_heads=2, num_key_value_heads=1)


def engine_with_graphs(tiny):
    config = dataclasses.replace(
        tiny.config, max_running=ROWS, max_step_tokens=STEP_TOKENS, num_blocks=65, prefix_cache=False
    )
    device = torch.device("cpu")
    pool = KvPool(
        tiny.spec,
        num_blocks=config.num_blocks,
        num_host_slots=0,
        block_tokens=config.block_tokens,
        dtype=torch.float32,
        device=device,
    )
    attention = HostAttention(attention_layers(tiny.spec), pool.layers)
    rows = BatchRows(ROWS, config.max_context_tokens, config.block_tokens, device)
    parameters = RowParameters(ROWS, tiny.spec.vocab_size, device)
    draw = TokenDraw(rows, parameters, ROWS)
    graphs = MixedGraphs(
        tiny.model,
        attention,
        rows,
        draw,
        SimpleNamespace(stream=None, pool=None, tuner=NoTuner()),
        max_running=ROWS,
        max_step_tokens=STEP_TOKENS,
    )
    sampler = Sampler(parameters, tiny.spec.eos_token_ids, make_drawer(ROWS, device))
    runner = ModelRunner(tiny.model, attention, pool, rows, parameters, sampler, None, graphs, threads=1)
    return assemble(config, tiny.spec, runner), graphs


def answers(engine, prompts, **params):
    found = {str(index): [] for index in range(len(prompts))}
    for index, prompt in enumerate(prompts):
        wanted = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, seed=index, **params)
        engine.submit(Submit(request_id=str(index), prompt=prompt, params=wanted, arrival=time.monotonic()))
    while engine.has_work:
        for _, event in engine.step():
            assert event.error is None
            found[event.request_id] += event.token_ids
    return list(found.values())


PROMPTS = [[5, 9, 2], [7] * 10, [3, 1, 4, 1, 5, 9, 2, 6], [11], [90, 80] * 4]


def test_they_draw_what_plain_steps_draw(tiny, captures):
    plain = answers(engine_of(tiny, max_running=ROWS, max_step_tokens=STEP_TOKENS, prefix_cache=False), PROMPTS)
    engine, _ = engine_with_graphs(tiny)
    assert answers(engine, PROMPTS) == plain  # captured at their first use
    assert captures
    before = len(captures)
    assert answers(engine, PROMPTS) == plain  # replayed
    assert len(captures) <= before + 4
    assert answers(engine, PROMPTS[:2], logprobs=1) == plain[:2]
    engine.runner.close()


def scores(engine, prompt, **params):
    """Return what is told of a prompt and of its answer."""
    wanted = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, **params)
    engine.submit(Submit(request_id="a", prompt=prompt, params=wanted, arrival=time.monotonic()))
    events = []
    while engine.has_work:
        events += [event for _, event in engine.step()]
    return events[0].prompt_logprobs, [score for event in events for score in event.logprobs or ()]


def test_a_scored_prompt_is_run_without_them_and_its_answer_with_them(tiny, captures, monkeypatch):
    engine, graphs = engine_with_graphs(tiny)
    _, answer = scores(engine, PROMPTS[2], logprobs=2)
    whole = PROMPTS[2] + [score.token_id for score in answer]
    runs, run = [], graphs.run
    monkeypatch.setattr(graphs, "run", lambda layout: runs.append(len(layout.positions)) or run(layout))
    told, _ = scores(engine, whole, prompt_logprobs=2)
    assert runs == [1, 1, 1], "tokens behind the first"
    for found, expected in zip(told.read(len(PROMPTS[2]) - 1, whole[len(PROMPTS[2]) :]), answer, strict=True):
        assert (found.token_id, found.top_ids) == (expected.token_id, expected.top_ids)
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert found.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-4)
    engine.runner.close()


def test_sizes_prepared_in_idle_moments_are_not_captured_again(tiny, captures):
    plain = answers(engine_of(tiny, max_running=ROWS, max_step_tokens=STEP_TOKENS, prefix_cache=False), PROMPTS)
    engine, graphs = engine_with_graphs(tiny)
    with torch.inference_mode():
        while graphs.prepare_next():
            pass
    prepared = len(captures)
    assert answers(engine, PROMPTS) == plain
    assert len(captures) == prepared
    engine.runner.close()


def test_products_are_tried_until_none_was_skipped(tiny, captures):
    engine, graphs = engine_with_graphs(tiny)
    asked = []
    skips = iter([2, 1])  # a first size needs three moments

    def tune(num_tokens, tuner):
        asked.append(num_tokens)
        tuner.num_skipped = next(skips, 0)

    graphs._model = SimpleNamespace(tune=tune, tune_logits=lambda num_rows, tuner: None)
    while graphs.try_products():
        pass
    assert asked[:3] == [asked[0]] * 3
    assert sorted(set(asked)) == asked[2:]
    engine.runner.close()


def test_what_runs_another_way_since_a_trial_is_captured_again(tiny, captures):
    engine, graphs = engine_with_graphs(tiny)
    plain = answers(engine, PROMPTS)
    with torch.inference_mode():
        while graphs.prepare_next():
            pass
    prepared, renewed = len(captures), []
    better = graphs.token_counts[0]

    def tune(num_tokens, tuner):
        tuner.num_better = int(num_tokens == better)

    graphs._model = SimpleNamespace(tune=tune, tune_logits=lambda num_rows, tuner: None)
    graphs._decode_graphs = SimpleNamespace(renew=renewed.append)
    while graphs.try_products():
        pass
    assert len(captures) == prepared  # not in the moment of the trial
    graphs._model = tiny.model
    graphs._tuner.num_better = 0
    while graphs.prepare_next():
        pass
    assert renewed == [better]
    assert len(captures) == prepared + sum(places.num_tokens == better for places in graphs._forwards.captured())
    assert answers(engine, PROMPTS) == plain
    engine.runner.close()


@pytest.mark.parametrize("most", [16, 256, 1000, 8192, 16384])
def test_the_ladder_of_token_counts_wastes_little(most):
    counts = token_counts(most)
    assert counts == sorted(set(counts)) and counts[-1] == most
    wasted = [
        (size - needed) / size for needed in range(257, most + 1) for size in [counts[np.searchsorted(counts, needed)]]
    ]
    assert max(wasted, default=0.0) < 0.25
