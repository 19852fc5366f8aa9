"""Answers that another engine began: the rest is what the first would have made."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.test_scheduler import drain, make_engine, submit, tokens_of


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 96), min_size=1, max_size=12), st.integers(1, 19), st.sampled_from([0, 4]))
def test_an_answer_goes_on_as_if_it_had_been_one(prompt, cut, drafts):
    first = make_engine(drafts=drafts)
    first.submit(submit("whole", prompt, max_tokens=20, ignore_eos=True))
    events = drain(first)["whole"]
    whole = tokens_of(events)
    second = make_engine(drafts=drafts)
    second.submit(
        submit("rest", prompt + whole[:cut], max_tokens=20, ignore_eos=True, terms={"num_answer_tokens": cut})
    )
    rest = drain(second)["rest"]
    assert tokens_of(rest) == whole[cut:]
    assert rest[-1].finish == events[-1].finish


def test_cached_tokens_of_the_answer_are_not_the_prompts():
    engine = make_engine()
    known = list(range(1, 21))
    engine.submit(submit("warm", known))
    drain(engine)
    engine.submit(submit("rest", known, max_tokens=18, terms={"num_answer_tokens": 15}))
    (first, *_) = drain(engine)["rest"]
    assert first.num_cached_tokens == 5


@pytest.mark.parametrize("num_answer_tokens", [-1, 4, 8, 9])
def test_what_leaves_no_prompt_or_nothing_to_make_is_refused(num_answer_tokens):
    engine = make_engine()
    prompt = [1, 2, 3, 4] if num_answer_tokens < 8 else [1] * 12
    refused = engine.submit(submit("rest", prompt, max_tokens=8, terms={"num_answer_tokens": num_answer_tokens}))
    assert [event.error_code for _, event in refused] == ["invalid_parameter"]
    assert not engine.has_work
