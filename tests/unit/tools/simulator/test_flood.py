"""A flood of one tenant that goes on for long, and what another waits for: the shipped profile of an H200."""

import msgspec
import pytest

from penstock.request import NO_TARGETS, Targets
from tests.fakes.flood import FloodedEngine, asked_now_and_then, flood, h200


def ask(prompt, *, times, num_flooding, seconds=0.2, targets=NO_TARGETS, shape=(1024, 128)):
    """Ask so often, alone and in a flood of another tenant."""
    server = h200()
    asked, others = [
        [msgspec.structs.replace(submit, targets=targets) for submit in submits]
        for submits in (asked_now_and_then(times, prompt, seconds), flood(num_flooding, *shape))
    ]
    return FloodedEngine(server).run(asked), FloodedEngine(server).run([*asked, *others])


def test_a_short_prompt_waits_for_the_steps_under_way_and_for_itself():
    # In the end the flood's requests have waited for over 10 s, and would rise.
    alone, flooded = ask(64, times=55, num_flooding=480)
    assert flooded.ms("before", 1.0) < 1.0
    assert flooded.ms("own", 0.9) <= 1.2 * alone.ms("own", 0.9)
    assert flooded.ms("rest", 1.0) < 25.0, "no step of the flood is long"


@pytest.mark.parametrize(("prompt", "seconds"), [(1024, 0.2), (2048, 0.2), (2048, 0.5)])
def test_a_long_prompts_first_token_comes_within_1_3_times_its_solo_time(prompt, seconds):
    alone, flooded = ask(prompt, times=round(6 / seconds), num_flooding=250, seconds=seconds)
    assert flooded.ms("ttft", 0.95) <= 1.3 * alone.ms("ttft", 0.95)


@pytest.mark.parametrize(
    ("num_flooding", "shape"), [(30, (8192, 16)), (300, (1024, 1)), (8, (32000, 16)), (750, (64, 1))]
)
def test_so_it_does_where_few_of_a_flood_hold_rows(num_flooding, shape):
    alone, flooded = ask(2048, times=24, num_flooding=num_flooding, shape=shape)
    assert flooded.ms("ttft", 0.95) <= 1.3 * alone.ms("ttft", 0.95)


def test_so_it_does_for_a_prompt_as_long_as_many_others_together():
    alone, flooded = ask(8192, times=10, num_flooding=12, seconds=1.0, shape=(16384, 512))
    assert flooded.ms("ttft", 0.95) <= 1.3 * alone.ms("ttft", 0.95)


def test_where_a_flood_holds_every_row_with_a_promise_another_waits_until_it_is_a_little_behind():
    promised = Targets(time_per_token_seconds=0.03)
    _, flooded = ask(64, times=8, num_flooding=300, seconds=0.25, targets=promised, shape=(64, 1000))
    assert flooded.ms("ttft", 1.0) <= 300.0
    assert flooded.num_broken_promises == 0


def test_a_flood_of_prompts_that_has_waited_for_long_passes_nobody():
    # Each of its prompts takes over a second, and those that wait have waited for 10 s when the last is asked for.
    _, flooded = ask(2048, times=24, num_flooding=14, seconds=0.5, shape=(32000, 16))
    assert flooded.ms("before", 1.0) < 25.0


def test_a_prompt_for_which_a_flood_pauses_runs_whole_where_it_ends_sooner_so():
    _, flooded = ask(1024, times=8, num_flooding=200, seconds=0.5)
    assert flooded.ms("own", 0.5) < 24.5, "two steps of 512 tokens take 25.3 ms, one of 1,024 takes 23.5"


def test_a_time_per_token_that_everybody_is_promised_makes_a_first_token_wait_hardly_longer():
    _, plain = ask(2048, times=30, num_flooding=250)
    _, promised = ask(2048, times=30, num_flooding=250, targets=Targets(time_per_token_seconds=0.05))
    assert promised.ms("ttft", 0.95) <= 1.25 * plain.ms("ttft", 0.95)
    assert promised.num_broken_promises == 0
