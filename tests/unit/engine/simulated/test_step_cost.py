"""What a step costs by a profile."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.scheduler.step_plan import RowSlice, StepPlan, TierCopy
from penstock.engine.simulated.profile import read_profile
from penstock.engine.simulated.step_cost import cost_of, step_ms, work_of
from tests.fakes.small_profile import small_profile


def singles(count: int, context: int) -> list[RowSlice]:
    return [RowSlice(row, row, context - 1, 1, 1) for row in range(count)]


def test_a_decode_step_costs_what_the_captured_size_that_holds_it_does():
    profile = small_profile()
    assert step_ms(profile, work_of(singles(1, 1000))) == pytest.approx(10 + 1)
    assert step_ms(profile, work_of(singles(2, 1000))) == pytest.approx(20 + 2)
    assert step_ms(profile, work_of(singles(5, 200))) == pytest.approx(20 + 1)


def test_a_mixed_step_costs_what_the_captured_count_that_holds_it_does():
    mixed = msgspec.structs.replace(small_profile().mixed, graph_tokens=(64, 256))
    profile = small_profile(mixed=mixed)
    for tokens, ms in ((2, 64), (64, 64), (65, 256), (300, 300)):
        assert step_ms(profile, work_of([RowSlice(0, 0, 0, tokens, 1)])) == pytest.approx(ms)


def test_one_prompt_token_without_a_draw_is_no_decode_step():
    assert work_of(singles(2, 10)).is_decode
    assert not work_of([*singles(1, 10), RowSlice(1, 1, 0, 1, 0)]).is_decode
    assert not work_of([*singles(1, 10), RowSlice(1, 1, 0, 2, 1)]).is_decode


@given(st.integers(2, 500), st.data())
def test_chunks_look_back_at_as_much_as_the_whole(tokens: int, data: st.DataObject):
    cut = data.draw(st.integers(0, tokens))
    whole = work_of([RowSlice(0, 0, 0, tokens, 1)])
    chunks = [work_of([RowSlice(0, 0, start, count, 1)]) for start, count in ((0, cut), (cut, tokens - cut)) if count]
    # A chunk of one token counts as context read, not as pairs.
    assert sum(chunk.pairs + chunk.single_context for chunk in chunks) == whole.pairs


def test_copies_between_tiers_take_their_time():
    plan = StepPlan(0, singles(1, 1))
    plan.tier_copies = [TierCopy(1, 0, to_host=True), TierCopy(2, 1, to_host=False)]
    assert cost_of(small_profile(), plan).run == pytest.approx(0.020 + 1e-6, rel=1e-3)


@pytest.mark.parametrize(("rows", "ms"), [(1, 4.26), (8, 4.40), (64, 6.12), (256, 12.42)])
def test_the_h200_profile_agrees_with_the_measured_decode_steps(rows: int, ms: float):
    # docs/benchmarks.md: answers of 256 tokens after prompts of 512.
    assert step_ms(read_profile("h200-llama-8b"), work_of(singles(rows, 640))) == pytest.approx(ms, rel=0.1)


def test_the_h200_profile_agrees_with_the_measured_prefill():
    shape = work_of([RowSlice(row, row, 0, 2048, 1) for row in range(4)])
    assert step_ms(read_profile("h200-llama-8b"), shape) == pytest.approx(190, rel=0.1)
