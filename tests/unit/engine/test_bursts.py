"""Prompts that come at once, and the answers beside them, where callers have no names and state no times."""

import pytest

from penstock.request import Targets
from tests.fakes.virtual_engine import H200_LLAMA_8B, VirtualEngine, request

NUM_ANSWERS, NUM_PROMPTS, PROMPT = 16, 8, 1024
BURST_AT = 2.0


def run(num_prompts=NUM_PROMPTS, gap=0.008, **terms):
    """Some answers run, then prompts come shortly after one another.

    Returns the steps with prompts from then on, and what became of the prompts.
    """
    engine = VirtualEngine(known=H200_LLAMA_8B)
    answers = [request(f"a{index}", 0.001 * index, prompt=100, answer=1200, **terms) for index in range(NUM_ANSWERS)]
    prompts = [
        request(f"p{index}", BURST_AT + gap * index, prompt=PROMPT, answer=2, **terms) for index in range(num_prompts)
    ]
    engine.run(answers, until=BURST_AT)
    num_before = len(engine.runner.shapes)
    outcomes = engine.run(prompts)
    steps = [shape for shape in engine.runner.shapes[num_before:] if shape.prompt_tokens]
    return steps, [outcomes[submit.request_id] for submit in prompts]


def test_prompts_of_a_burst_run_whole_and_one_to_a_step():
    steps, _ = run()
    sizes = [shape.prompt_tokens for shape in steps]
    assert sum(sizes) == NUM_PROMPTS * PROMPT
    assert sizes[-NUM_PROMPTS + 2 :] == [PROMPT] * (NUM_PROMPTS - 2)


@pytest.mark.parametrize("terms", [{"tenant": "a"}, {"targets": Targets(ttft_seconds=5.0)}])
def test_but_not_where_callers_have_names_or_state_times(terms):
    steps, prompts = run(**terms)
    assert not any(prompt.refused for prompt in prompts)
    assert max(shape.prompt_tokens for shape in steps) < PROMPT
    assert all(shape.num_rows for shape in steps)


def test_a_prompt_that_is_alone_and_not_late_runs_in_pieces_beside_the_answers():
    steps, _ = run(num_prompts=1)
    assert len(steps) > 1
    assert all(shape.num_rows for shape in steps)


def test_in_overload_prompts_run_together():
    steps, _ = run(num_prompts=120, gap=0.0001)
    assert max(shape.prompt_tokens for shape in steps) > 4 * PROMPT


def test_answers_pause_for_late_prompts_for_three_steps_in_a_row_at_most():
    steps, _ = run()
    paused = "".join("." if shape.num_rows else "p" for shape in steps)
    assert "ppp" in paused
    assert "pppp" not in paused


def test_and_do_not_pause_for_two_that_are_not_late():
    steps, _ = run(num_prompts=2)
    assert all(shape.num_rows for shape in steps)
