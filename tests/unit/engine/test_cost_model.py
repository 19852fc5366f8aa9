"""The cost model learns what steps take, on any machine, through noise and hiccups."""

import random
from collections.abc import Callable
from statistics import median

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.scheduler.cost_model import CostModel, StepCosts, StepShape, with_prompt
from penstock.engine.scheduler.step_plan import RowSlice, StepPlan
from penstock.engine.scheduler.step_times import StepTimes, shape_of
from tests.fakes.virtual_engine import H200_LLAMA_8B, VirtualClock

Machine = Callable[[StepShape], float]


def a_processor(shape: StepShape) -> float:
    """No knee: every token costs from the first on, and so does attention."""
    pairs = shape.context_tokens + shape.prompt_pairs
    return 0.013 + 1.5e-3 * shape.num_tokens + 4e-4 * shape.num_rows + 4e-8 * pairs


def a_staircase(shape: StepShape) -> float:
    """Rows and tokens are padded, as captured graphs and tiles do."""
    rows, tokens = -(-shape.num_rows // 8) * 8, -(-shape.num_tokens // 128) * 128
    prompts = 6e-4 + 22.5e-6 * max(0, tokens - 250) + 2e-10 * shape.prompt_pairs if shape.prompt_tokens else 0.0
    return 3.9e-3 + 9.5e-6 * rows + 31e-9 * shape.context_tokens + prompts


MACHINES = {
    "H200": (H200_LLAMA_8B.seconds, 256, 2048),
    "CPU": (a_processor, 32, 256),
    "stairs": (a_staircase, 256, 2048),
}


def random_shape(rng: random.Random, max_rows: int, max_prompt: int) -> StepShape:
    rows = rng.randint(1, max_rows)
    prompt = rng.choice([0, 0, rng.randint(1, max_prompt)])
    return with_prompt(StepShape(rows, rows * rng.randint(100, 2000)), prompt, rng.randint(0, 4000))


def teach(
    model: CostModel,
    name: str,
    seed: int,
    steps: int,
    *,
    noise: float = 0.05,
    hiccups: float = 0.02,
    slower: float = 1.0,
) -> None:
    """Run so many steps on a machine that takes `slower` times as long; a part of them are 10 times as long again."""
    seconds, max_rows, max_prompt = MACHINES[name]
    rng = random.Random(seed)
    for _ in range(steps):
        shape = random_shape(rng, max_rows, max_prompt)
        took = slower * seconds(shape) * rng.lognormvariate(0, noise) * (10.0 if rng.random() < hiccups else 1.0)
        model.observe(shape, took)


def true_error(model: CostModel, name: str, *, slower: float = 1.0) -> float:
    """The median error of what is foreseen of shapes of every kind, against a machine without noise."""
    seconds, max_rows, max_prompt = MACHINES[name]
    rng = random.Random(0)
    shapes = [random_shape(rng, max_rows, max_prompt) for _ in range(101)]
    return median(abs(model.seconds(shape) / (slower * seconds(shape)) - 1.0) for shape in shapes)


@pytest.mark.parametrize("name", MACHINES)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_after_200_noisy_steps_the_median_error_is_at_most_ten_per_cent(name: str, seed: int) -> None:
    model = CostModel()
    teach(model, name, seed, 200)
    assert model.median_error is not None
    assert model.median_error <= 0.10


def test_the_coefficients_of_a_machine_are_found() -> None:
    model = CostModel()
    teach(model, "H200", 1, 600, hiccups=0.0)
    costs = model.costs
    assert costs.fixed + costs.prompt_step == pytest.approx(4.5e-3, rel=0.1)
    assert costs.context_token == pytest.approx(31e-9, rel=0.1)
    assert costs.token_seconds == pytest.approx(22.5e-6, rel=0.1)


def test_no_coefficient_is_ever_negative() -> None:
    model = CostModel()
    teach(model, "stairs", 3, 100, noise=0.5, hiccups=0.2)
    costs = model.costs
    parts = [costs.fixed, costs.prompt_step, costs.prompt_pair, costs.row, costs.context_token]
    assert min(parts + [each for _, each in costs.tokens_beyond]) >= 0.0


factors = st.floats(1.4, 12.0).flatmap(lambda factor: st.sampled_from([factor, 1.0 / factor]))


@pytest.mark.parametrize("name", MACHINES)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), slower=factors)
def test_a_machine_that_becomes_slower_or_faster_is_followed_within_200_steps(
    name: str, seed: int, slower: float
) -> None:
    model = CostModel()
    teach(model, name, seed, 200, hiccups=0.05)
    teach(model, name, seed + 1, 200, hiccups=0.05, slower=slower)
    assert model.median_error is not None
    assert model.median_error <= 0.10
    assert true_error(model, name, slower=slower) <= 0.10


@pytest.mark.parametrize("name", MACHINES)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_hiccup_now_and_then_changes_nothing_of_what_is_known(name: str, seed: int) -> None:
    model = CostModel()
    teach(model, name, seed, 400, hiccups=0.05)
    assert true_error(model, name) <= 0.05


@pytest.mark.parametrize("name", MACHINES)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_stall_and_the_steps_that_seem_to_take_no_time_behind_it_spoil_nothing(name: str, seed: int) -> None:
    model, (seconds, max_rows, max_prompt) = CostModel(), MACHINES[name]
    rng = random.Random(seed)
    took_no_time = False
    for _ in range(300):
        shape = random_shape(rng, max_rows, max_prompt)
        stalls = not took_no_time and rng.random() < 0.05
        model.observe(shape, seconds(shape) * (0.02 if took_no_time else 10.0 if stalls else 1.0))
        took_no_time = stalls
    assert true_error(model, name) <= 0.10


@given(slower=st.floats(1.4, 12.0))
@settings(max_examples=10, deadline=None)
def test_four_short_answers_are_enough_to_see_that_prompts_take_longer(slower: float) -> None:
    model, prompt = CostModel(), with_prompt(StepShape(), 300, 0)
    answer = [StepShape(1, 300 + step) for step in range(5)]
    for num_tokens in range(20, 320, 10):
        for shape in (with_prompt(StepShape(), num_tokens, 0), *answer):
            model.observe(shape, a_processor(shape))
    for shape in 4 * (prompt, *answer):
        model.observe(shape, slower * a_processor(shape))
    assert model.seconds(prompt) == pytest.approx(slower * a_processor(prompt), rel=0.1)


def test_what_prompts_cost_is_kept_while_only_answers_run() -> None:
    model = CostModel()
    teach(model, "H200", 1, 300)
    prompt = with_prompt(StepShape(8, 8000), 1500, 0)
    before = model.seconds(prompt)
    for context in range(3000):
        shape = StepShape(8, 8000 + context)
        model.observe(shape, H200_LLAMA_8B.seconds(shape))
    assert model.seconds(prompt) == pytest.approx(before, rel=0.1)


def test_costs_travel_as_plain_data_and_are_trusted_where_they_arrive() -> None:
    model = CostModel()
    teach(model, "H200", 1, 300)
    copied = CostModel(msgspec.json.decode(msgspec.json.encode(model.costs), type=StepCosts))
    shape = StepShape(30, 40_000, 700, 300_000)
    assert copied.is_trusted
    assert copied.seconds(shape) == pytest.approx(model.seconds(shape))
    assert not CostModel().is_trusted


def test_a_steps_own_time_leaves_out_the_wait_for_the_one_before_it() -> None:
    clock, model = VirtualClock(), CostModel()
    times = StepTimes(model, clock)
    plan = StepPlan(0, [RowSlice(0, 0, 100, 1, 1)])
    shape = shape_of(plan)
    assert shape == StepShape(1, 101)
    for _ in range(100):
        times.launch(plan)
        times.launch(plan)
        clock.now += 0.010
        times.settle(0.010, clock.now)
        clock.now += 0.010
        times.settle(0.020, clock.now)  # launched 20 ms ago, but only begun 10 ms ago
        clock.now += 1.0  # idle
    assert model.seconds(shape) == pytest.approx(0.010, rel=0.02)


def test_the_device_is_free_when_all_that_is_launched_will_be_done() -> None:
    clock = VirtualClock()
    times = StepTimes(CostModel(H200_LLAMA_8B), clock)
    plan = StepPlan(0, [RowSlice(0, 0, 0, 1, 1)])
    one = times.model.seconds(shape_of(plan))
    times.launch(plan)
    times.launch(plan)
    assert times.free_at(0.0) == pytest.approx(2 * one)
    assert times.free_at(1.0) == 1.0


def test_a_long_context_does_not_empty_a_step_in_which_tokens_cost_next_to_nothing():
    costs = StepCosts(
        fixed=4e-3, prompt_step=5e-4, prompt_pair=1e-11, row=0.0, context_token=0.0, tokens_beyond=((256, 2.5e-5),)
    )
    seconds = costs.seconds(with_prompt(StepShape(), 256, 0))
    for context in (0, 1_000, 10_000):
        fitting = costs.prompt_tokens_within(seconds, StepShape(), context, 2_000)
        assert fitting >= 256
        assert costs.seconds(with_prompt(StepShape(), fitting, context)) <= 1.05 * seconds


@given(
    seconds=st.floats(1e-3, 0.1), context=st.integers(0, 100_000), most=st.integers(0, 8192), rows=st.integers(0, 256)
)
def test_no_more_tokens_fit_than_a_step_hardly_longer_holds(seconds, context, most, rows):
    shape = StepShape(rows, rows * 500)
    fitting = H200_LLAMA_8B.prompt_tokens_within(seconds, shape, context, most)
    assert 0 <= fitting <= most
    if fitting:
        assert H200_LLAMA_8B.seconds(with_prompt(shape, fitting, context)) <= 1.05 * seconds + 1e-12
    if fitting < most:
        assert H200_LLAMA_8B.seconds(with_prompt(shape, fitting + 1, context)) > seconds
