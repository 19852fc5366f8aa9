"""How a step's time is divided among the prompts of several tenants."""

import pytest

from penstock.engine.cache.kv_cache import RequestCache
from penstock.engine.scheduler.cost_model import StepCosts, StepShape
from penstock.engine.scheduler.foresight import Foresight
from penstock.engine.scheduler.prompt_work import PromptWork
from penstock.engine.scheduler.request_state import RequestState, TenantAccount
from penstock.request import NO_TARGETS, SamplingParams, Targets
from tests.fakes.virtual_engine import H200_LLAMA_8B, VirtualClock

STEP_SECONDS = 0.02


def prompt(number, tenant, num_tokens, *, asked, targets=NO_TARGETS):
    return RequestState(
        number=number, client=b"", request_id=str(number), tokens=[1] * num_tokens, num_prompt_tokens=num_tokens,
        max_total_tokens=num_tokens + 8, params=SamplingParams(), stop_ids=frozenset(), seed=0, arrival=0.0,
        cache=RequestCache(b""), tenant=tenant, account=TenantAccount(tenant, num_open=asked, wanted_tokens=asked),
        level=(0, 0), due=0.0, work=PromptWork.of_one(num_tokens),
        targets=targets,
    ), num_tokens  # fmt: skip


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def sizes(clock):
    chunks = Foresight.make(max_step_tokens=8192, clock=clock, known=H200_LLAMA_8B).chunks
    return lambda *prompts: chunks.sizes(prompts, StepShape(), STEP_SECONDS, 8192)


def test_a_tenant_that_asks_for_less_has_its_step_to_itself(sizes):
    given = sizes(prompt(0, "b", 400, asked=1), prompt(1, "a", 1000, asked=50))
    assert given[0] == 400
    assert given[1] < 40


def test_what_costs_nothing_is_given_to_the_others(sizes):
    given = sizes(prompt(0, "b", 60, asked=1), prompt(1, "a", 1000, asked=50))
    assert sum(given.values()) >= 250, "up to there tokens are free on this device"


@pytest.mark.parametrize(
    "other", [{"tenant": "a", "asked": 1}, {"tenant": "a", "asked": 50, "targets": Targets(ttft_seconds=1.0)}]
)
def test_prompts_of_equals_and_promised_ones_share_the_step(sizes, other):
    given = sizes(prompt(0, "b", 400, asked=1), prompt(1, num_tokens=1000, **other))
    assert H200_LLAMA_8B.seconds(StepShape(prompt_tokens=sum(given.values()) + 1)) > STEP_SECONDS


def test_steps_of_ones_own_take_no_more_than_a_small_part_of_the_time(clock, sizes):
    num_steps = own = 0
    while clock.now < 20.0:
        given = sizes(prompt(0, "b", 64, asked=1), prompt(1, "a", 1000, asked=50))
        own += given[1] < 250
        num_steps += 1
        clock.now += STEP_SECONDS
    lost = own * H200_LLAMA_8B.seconds(StepShape(prompt_tokens=1))
    assert 0.5 * 0.03 <= lost / clock.now <= 0.03 + 0.1 / clock.now
    assert own < num_steps / 2


# Two products of 500 tokens take longer than one of 1,000.
LINEAR = StepCosts(
    fixed=4e-3, prompt_step=1e-3, prompt_pair=0.0, row=1e-5, context_token=3e-8, tokens_beyond=((0, 2e-5),)
)


@pytest.mark.parametrize(
    ("costs", "num_tokens", "room", "is_whole"),
    [
        (LINEAR, 2000, 8192, True),
        (LINEAR, 2000, 1900, False),  # the runner takes no more
        (LINEAR, 2000, 0, False),  # nobody pauses for it
        (LINEAR, 2600, 8192, False),  # over three chunks
        (H200_LLAMA_8B, 500, 8192, False),  # up to its knee this device runs chunks for nothing
    ],
)
def test_a_prompt_that_others_pause_for_runs_whole_if_it_is_not_long_and_ends_sooner_so(
    clock, costs, num_tokens, room, is_whole
):
    chunks = Foresight.make(max_step_tokens=8192, clock=clock, known=costs).chunks
    seconds = costs.seconds(StepShape(prompt_tokens=250 if costs is H200_LLAMA_8B else 800))
    given = chunks.sizes([prompt(0, "b", num_tokens, asked=1)], StepShape(), seconds, 8192, whole_room=room)
    assert (given[0] == num_tokens) is is_whole


@pytest.fixture
def sizes_of_graphs(clock):
    """For a runner that fills steps up to one of these numbers of tokens."""
    foresight = Foresight.make(
        max_step_tokens=8192, clock=clock, known=H200_LLAMA_8B, step_sizes=(64, 128, 256, 512, 640, 768, 1024, 2048)
    )
    return lambda shape, *prompts: foresight.chunks.sizes(prompts, shape, STEP_SECONDS, 8192)


def test_a_prompt_that_is_cut_is_cut_where_the_runner_has_a_size(sizes_of_graphs):
    given = sizes_of_graphs(StepShape(20, 20_000), prompt(0, "a", 100, asked=1), prompt(1, "a", 4000, asked=1))
    assert given[0] == 100
    assert 20 + sum(given.values()) in (512, 640, 768)


def test_a_prompt_that_ends_within_what_is_filled_up_anyway_is_not_cut(sizes_of_graphs):
    cut = sizes_of_graphs(StepShape(20, 20_000), prompt(0, "a", 4000, asked=1))[0]
    longer = cut + 200
    assert sizes_of_graphs(StepShape(20, 20_000), prompt(0, "a", longer, asked=1))[0] == longer


def test_prompts_that_all_fit_are_not_cut(sizes_of_graphs):
    assert sizes_of_graphs(StepShape(), prompt(0, "a", 300, asked=1), prompt(1, "a", 90, asked=1)) == {
        0: 300, 1: 90,
    }  # fmt: skip


def test_prompts_of_others_do_not_make_a_step_that_is_left_to_one_tenant_larger_than_the_runner_takes_anyway(
    sizes_of_graphs,
):
    given = sizes_of_graphs(StepShape(2, 2000), prompt(0, "b", 510, asked=3), prompt(1, "a", 1000, asked=50))
    assert given == {0: 510, 1: 0}
    given = sizes_of_graphs(StepShape(2, 2000), prompt(0, "b", 500, asked=3), prompt(1, "a", 1000, asked=50))
    assert given == {0: 500, 1: 10}


def test_a_step_may_be_longer_until_a_prompt_ends_and_then_holds_what_it_has_room_for_anyway(clock):
    known = StepCosts(
        fixed=0.002, prompt_step=0.0, prompt_pair=0.0, row=0.0, context_token=0.0, tokens_beyond=((0, 2e-5),)
    )
    chunks = Foresight.make(max_step_tokens=8192, clock=clock, known=known, step_sizes=(512, 1024, 1152)).chunks
    prompts = [prompt(number, "", 1000, asked=1) for number in range(3)]
    shape = StepShape(40, 40 * 100)
    assert chunks.sizes(prompts, shape, 0.0123, 8192) == {0: 472, 1: 0, 2: 0}
    assert chunks.sizes(prompts, shape, 0.0123, 8192, end_seconds=0.05) == {0: 1000, 1: 112, 2: 0}
