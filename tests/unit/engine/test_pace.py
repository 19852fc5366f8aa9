"""A batch's prompts run beside its answers, late but never too late."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.block_hash import BlockHasher
from penstock.engine.cache.kv_cache import KvCache
from penstock.engine.engine import Engine
from penstock.engine.messages import Submit
from penstock.engine.metrics import EngineMetrics
from penstock.engine.scheduler.pace import BatchPace
from penstock.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from penstock.request import SamplingParams
from tests.fakes.fake_runner import FakeRunner

VOCAB, BLOCK, ROWS, MOST = 97, 4, 8, 64


def make_engine(pace, num_blocks=401):
    cache = KvCache(num_blocks, BlockHasher(b"key", BLOCK), share_prefixes=False)
    config = SchedulerConfig(
        max_running=ROWS,
        max_step_tokens=MOST,
        max_waiting=100,
        max_context_tokens=200,
        vocab_size=VOCAB,
        eos_token_ids=(13,),
    )
    return Engine(Scheduler(config, cache, EngineMetrics(), pace=pace), FakeRunner(ROWS, VOCAB, BLOCK))


def run(pace, lengths, num_blocks=401, **params):
    """Run (prompt, answer) lengths, longest answer first. Returns the tokens of each step."""
    engine = make_engine(pace, num_blocks)
    for number, (prompt, answer) in enumerate(sorted(lengths, key=lambda item: -item[1])):
        sampling = SamplingParams(max_tokens=answer, temperature=0.0, seed=1, **params)
        engine.submit(
            Submit(request_id=str(number), prompt=[number % VOCAB] * prompt, params=sampling, arrival=float(number))
        )
    sizes = []
    launch = engine.runner.launch
    engine.runner.launch = lambda plan: sizes.append(plan.num_tokens) or launch(plan)
    while engine.has_work:
        engine.step()
    return sizes


def test_prompts_are_spread_over_the_steps_of_the_longest_answer():
    lengths = [(20, 100)] + [(20, 10)] * 6
    at_once = run(None, lengths, ignore_eos=True)
    spread = run(BatchPace(8, MOST), lengths, ignore_eos=True)
    assert max(at_once) == MOST
    assert max(spread[1:]) == 8 and spread[0] == 3 * 8  # the first prompt has nothing to run beside
    assert len(spread) == len(at_once)


def test_nothing_is_held_back_where_an_answer_may_end_early():
    lengths = [(20, 100)] + [(20, 10)] * 6
    assert run(BatchPace(8, MOST), lengths) == run(None, lengths)
    assert run(BatchPace(8, MOST), lengths, ignore_eos=True, stop=("x",)) == run(
        None, lengths, ignore_eos=True, stop=("x",)
    )


def test_answers_of_one_length_start_as_soon_as_they_can():
    lengths = [(30, 40)] * 8
    assert run(BatchPace(8, MOST), lengths, ignore_eos=True) == run(None, lengths, ignore_eos=True)


def test_small_prompts_run_together_in_some_of_the_steps():
    lengths = [(20, 100)] + [(20, 10)] * 6
    spread = run(BatchPace(8, MOST), lengths, ignore_eos=True)
    together = run(BatchPace(8, MOST, least_prompt_tokens=20), lengths, ignore_eos=True)
    with_prompts = [size for size in together if size > len(lengths)]
    assert len(with_prompts) <= len([size for size in spread if size > len(lengths)]) / 2
    assert len(together) == len(spread) and sum(together) == sum(spread)


class NeverPausing(BatchPace):
    def choose(self, ready, waiting):
        return ready


def test_answers_pause_for_prompts_that_cannot_wait_and_fill_the_last_steps():
    # Short prompts of middling answers leave little room for the long ones of short answers, and end long before.
    lengths = [(4, 100)] + [(4, 60)] * 4 + [(110, 10)] * 3
    steady = run(NeverPausing(8, MOST), lengths, ignore_eos=True)
    pausing = run(BatchPace(8, MOST), lengths, ignore_eos=True)
    assert sum(pausing) == sum(steady) and len(pausing) <= len(steady)
    assert sum(size > 8 for size in pausing[1:]) < sum(size > 8 for size in steady[1:])
    assert sum(pausing[-15:]) > sum(steady[-15:])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 80)), min_size=1, max_size=2 * ROWS), st.integers(1, 32))
def test_whoever_pauses_goes_on_however_few_blocks_there_are(lengths, knee):
    sizes = run(BatchPace(knee, MOST), lengths, num_blocks=51, ignore_eos=True)
    assert sum(sizes) >= sum(prompt + answer - 1 for prompt, answer in lengths)
    assert len(sizes) <= sum(prompt + answer for prompt, answer in lengths)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 80)), min_size=1, max_size=ROWS),
    st.integers(1, 32),
    st.sampled_from([0, 0, 7, 40]),
)
def test_the_last_answer_ends_about_as_soon_as_with_full_steps(lengths, knee, together):
    at_once = run(None, lengths, ignore_eos=True)
    spread = run(BatchPace(knee, MOST, together), lengths, ignore_eos=True)
    assert sum(spread) == sum(at_once)
    # Rounding chunks to whole tokens may cost a step for each request, and so may waiting for others to run with.
    assert len(spread) <= len(at_once) + len(lengths) * (2 if together else 1)


@pytest.mark.parametrize("knee", [1, 8, 1000])
def test_a_step_always_has_room_for_every_decoding_request(knee):
    sizes = run(BatchPace(knee, MOST), [(1, 50)] * ROWS, ignore_eos=True)
    assert sizes[5] == ROWS
