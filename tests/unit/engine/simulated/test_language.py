"""The model that is a hash: the same answer always, and an end only where one is asked for."""

from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.simulated.language import SimulatedLanguage
from penstock.request import SamplingParams

VOCAB, END = 97, 5
GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60)


def answer(language: SimulatedLanguage, prompt: list[int], params: SamplingParams, seed: int, count: int) -> list[int]:
    history = language.history(prompt)
    drawn: list[int] = []
    while len(drawn) < count and (not drawn or drawn[-1] != END):
        drawn.append(language.draw(history, params, seed))
        history = language.push(history, drawn[-1])
    return drawn


@given(tokens, tokens)
def test_a_history_is_the_same_however_it_was_made(first: list[int], second: list[int]):
    language = SimulatedLanguage(VOCAB, (END,))
    history = language.history(first)
    for token in second:
        history = language.push(history, token)
    assert history == language.history(first + second)


@given(tokens, st.integers(), st.integers())
def test_greedy_answers_do_not_depend_on_the_seed(prompt: list[int], one: int, other: int):
    language = SimulatedLanguage(VOCAB, (END,))
    assert answer(language, prompt, GREEDY, one, 8) == answer(language, prompt, GREEDY, other, 8)


def test_sampled_answers_depend_on_the_seed_and_every_token():
    language = SimulatedLanguage(VOCAB, (END,))
    prompts = [[1, 2, 3], [1, 2, 4], [0, 1, 2, 3], [1, 3, 2]]
    found = {tuple(answer(language, prompt, SAMPLED, seed, 12)) for prompt in prompts for seed in (0, 1)}
    assert len(found) == 8


def test_an_answer_never_ends_by_itself_unless_a_length_is_asked_for():
    language = SimulatedLanguage(VOCAB, (END,))
    assert END not in answer(language, [1], SAMPLED, 0, 5000)


def test_answers_have_the_mean_length_that_is_asked_for():
    language = SimulatedLanguage(VOCAB, (END,), mean_answer_tokens=20)
    lengths = [len(answer(language, [seed], SAMPLED, seed, 1000)) for seed in range(2000)]
    assert mean(lengths) == pytest.approx(20, rel=0.1)
    ignoring = SamplingParams(ignore_eos=True)
    assert all(len(answer(language, [seed], ignoring, seed, 200)) == 200 for seed in range(20))


def test_the_chosen_token_is_the_likeliest():
    logprob = SimulatedLanguage(VOCAB, ()).logprob(96, 3)
    assert logprob.top[0] == (96, logprob.logprob)
    assert [token for token, _ in logprob.top] == [96, 0, 1]
    assert sorted((value for _, value in logprob.top), reverse=True) == [value for _, value in logprob.top]
