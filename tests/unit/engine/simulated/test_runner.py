"""The simulated device under a clock of the test's own: when steps end, and what they give."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import gather
from penstock.engine.builder import assemble
from penstock.engine.config import resolve
from penstock.engine.engine import Engine
from penstock.engine.messages import Submit
from penstock.engine.scheduler.step_plan import RowSlice, RowStart, StepPlan
from penstock.engine.simulated.device import facts_of, make_runner
from penstock.engine.simulated.language import SimulatedLanguage
from penstock.engine.simulated.profile import HostCost, Profile
from penstock.engine.simulated.runner import SimulatedRunner, Timing
from penstock.request import SamplingParams
from penstock.tools.simulator.clock import VirtualClock
from penstock.tools.simulator.server import spec_of
from tests.fakes.small_profile import small_profile

PROMPTS = [[1, 2, 3] * 7, [4, 5] * 20, [6] * 33, [1, 2, 3] * 5]


def make(profile: Profile) -> tuple[SimulatedRunner, VirtualClock]:
    clock = VirtualClock()
    language = SimulatedLanguage(profile.vocab_size, ())
    return SimulatedRunner(profile, language, 8, Timing(clock.now, clock.sleep)), clock


def decode(number: int, context: int = 1) -> StepPlan:
    return StepPlan(number, [RowSlice(0, 0, context - 1, 1, 1)])


def test_a_step_is_done_when_the_profiled_device_would_be():
    runner, clock = make(small_profile())
    launched = runner.launch(decode(0, context=1000))
    assert clock.now() == 0
    assert launched.wait().seconds == pytest.approx(0.011)
    assert clock.now() == pytest.approx(0.011)


def test_steps_run_back_to_back():
    runner, clock = make(small_profile())
    first, second = runner.launch(decode(0)), runner.launch(decode(1))
    first.wait()
    assert clock.now() == pytest.approx(0.010, rel=0.01)
    clock.sleep(0.004)
    assert second.wait().seconds == pytest.approx(0.020, rel=0.01)
    assert clock.now() == pytest.approx(0.020, rel=0.01)


def test_a_device_that_was_idle_begins_at_the_launch():
    runner, clock = make(small_profile())
    runner.launch(decode(0)).wait()
    clock.sleep(1.0)
    runner.launch(decode(1)).wait()
    assert clock.now() == pytest.approx(1.020, rel=0.01)


def test_a_step_does_not_end_before_the_host_has_launched_it():
    host = HostCost(decode_launch_ms=50, mixed_launch_ms=0, arrival_ms=0, delivery_ms=0)
    runner, clock = make(small_profile(host=host))
    launched = runner.launch(decode(0))
    assert clock.now() == pytest.approx(0.050)
    launched.wait()
    assert clock.now() == pytest.approx(0.050)


def test_guesses_are_kept_as_long_as_they_are_right():
    runner, _ = make(small_profile())
    start = RowStart(0, [1, 2, 3], 3, SamplingParams(temperature=0.0), seed=0)
    plans = [StepPlan(0, [RowSlice(0, 0, 0, 3, 1)], [start])] + [decode(number, 3 + number) for number in (1, 2, 3)]
    plain = [runner.launch(plan).wait().slices[0].token_ids[0] for plan in plans]
    wrong = (plain[2] + 1) % 97
    runner.launch(plans[0]).wait()
    guessed = StepPlan(9, [RowSlice(0, 0, 3, 4, 4, (plain[1], wrong, 7))])
    assert runner.launch(guessed).wait().slices[0].token_ids == plain[1:3]


def engine_of(**options: object) -> Engine:
    profile = small_profile()
    spec, clock = spec_of(profile), VirtualClock()
    config, _ = resolve(gather({"block_tokens": 8, **options}, environ={}), spec, facts_of(profile))
    return assemble(config, spec, make_runner(profile, config, spec, Timing(clock.now, clock.sleep)), clock=clock.now)


def answers(engine: Engine, temperature: float = 1.0) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for index, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=40, temperature=temperature, seed=3)
        engine.submit(Submit(request_id=str(index), prompt=prompt, params=params, arrival=0.0))
    while engine.has_work:
        for _, event in engine.step():
            found.setdefault(event.request_id, []).extend(event.token_ids)
    return found


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4), st.integers(4, 64), st.sampled_from([None, "112KiB"]), st.booleans(), st.booleans())
def test_batches_chunks_and_preemption_change_no_token(running, step_tokens, kv_memory, prefix_cache, guess):
    engine = engine_of(
        max_running=running,
        max_step_tokens=max(running, step_tokens),
        kv_memory=kv_memory,
        prefix_cache=prefix_cache,
        speculative="ngram" if guess else "none",
    )
    assert answers(engine) == answers(engine_of())


def test_a_small_cache_is_as_small_as_the_profiled_models():
    engine = engine_of(kv_memory="112KiB", max_running=4)
    assert engine.scheduler.cache.pool.num_blocks == 14  # of 8 tokens, 1 KiB each
    engine.scheduler.placement.lengths.mean_tokens = 0.0
    answers(engine)
    assert engine.metrics.num_preemptions > 0
