"""The sampler by rows: each gets what its own request asked for."""

import math

import numpy as np
import pytest
import torch

from penstock.engine.sampling.drawer import CpuDrawer
from penstock.engine.sampling.row_parameters import RowParameters
from penstock.engine.sampling.sampler import Sampler
from penstock.engine.scheduler.step_plan import RowStart
from penstock.request import SamplingParams

VOCAB = 50
EOS = 9


@pytest.fixture
def sampler_of():
    def make(*params, tokens=(1, 2, 3), num_prompt=3):
        parameters = RowParameters(8, VOCAB, torch.device("cpu"))
        for row, item in enumerate(params):
            parameters.start(RowStart(row, list(tokens), num_prompt, item, seed=item.seed or row))
        return Sampler(parameters, (EOS,), CpuDrawer())

    return make


def sample(sampler, logits, position=3):
    rows = np.arange(len(logits))
    return sampler.sample(logits, rows, np.full(len(logits), position))


def logits_with(best, rows=1):
    logits = torch.zeros(rows, VOCAB)
    logits[:, best] = 5.0
    return logits


def test_greedy_and_random_rows_mix(sampler_of):
    sampler = sampler_of(
        SamplingParams(temperature=0.0), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=1)
    )
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    tokens = sample(sampler, logits).tokens
    assert tokens[0] == logits[0].argmax()
    assert tokens[2] == logits[2].argmax()


def test_a_rows_draw_does_not_depend_on_its_neighbours(sampler_of):
    random = SamplingParams(temperature=1.0, seed=11)
    filtered = SamplingParams(temperature=1.0, top_p=0.5, seed=4)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)).expand(3, VOCAB)
    alone = sample(sampler_of(random), logits[:1]).tokens[0]
    assert sample(sampler_of(random, filtered, SamplingParams(temperature=0.0)), logits).tokens[0] == alone


def test_a_bias_moves_the_choice(sampler_of):
    sampler = sampler_of(SamplingParams(temperature=0.0, logit_bias={4: 100.0}))
    assert sample(sampler, logits_with(20)).tokens.tolist() == [4]


def test_end_tokens_wait_for_the_minimum_length(sampler_of):
    sampler = sampler_of(SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(8,)))
    logits = logits_with(EOS)
    logits[0, 8] = 4.0
    logits[0, 7] = 3.0
    assert sample(sampler, logits, position=3).tokens.tolist() == [7]
    assert sample(sampler, logits, position=4).tokens.tolist() == [7]
    assert sample(sampler, logits, position=5).tokens.tolist() == [EOS]


def test_penalties_count_what_was_sampled(sampler_of):
    sampler = sampler_of(SamplingParams(temperature=0.0, frequency_penalty=2.0))
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6] = 3.0, 2.0
    assert [sample(sampler, logits).tokens.item() for _ in range(4)] == [5, 6, 5, 0]


def test_a_resumed_row_counts_its_answer_again(sampler_of):
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    sampler = sampler_of(params, tokens=(1, 2, 3, 5), num_prompt=3)
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6] = 3.0, 2.0
    assert sample(sampler, logits, position=4).tokens.tolist() == [6]


def test_log_probabilities_are_the_models_own(sampler_of):
    plain = SamplingParams(temperature=0.0)
    scored = SamplingParams(temperature=0.0, logprobs=2, logit_bias={3: 50.0})
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2))
    outcome = sample(sampler_of(plain, scored), logits)
    tokens = outcome.tokens.tolist()
    [(draw, score)] = outcome.to_host().read_logprobs(tokens).items()
    reference = torch.log_softmax(logits[1], dim=-1)
    assert (draw, score.token_id) == (1, 3)
    assert math.isclose(score.logprob, reference[3].item(), rel_tol=1e-5)
    assert [token for token, _ in score.top] == reference.topk(2).indices.tolist()


def test_a_vocabulary_of_fewer_tokens_than_asked_for_gives_all_of_them():
    wanted = SamplingParams(logprobs=20, top_k=20, logit_bias={0: 1.0}, presence_penalty=1.0)
    logits = torch.randn(2, 4, generator=torch.Generator().manual_seed(2))
    parameters = RowParameters(2, 4, torch.device("cpu"))
    for row, params in enumerate((wanted, SamplingParams(logprobs=2))):
        parameters.start(RowStart(row, [1, 2, 3], 3, params, seed=row))
    outcome = sample(Sampler(parameters, (0,), CpuDrawer()), logits)
    scores = outcome.to_host().read_logprobs(outcome.tokens.tolist())
    assert [len(scores[draw].top) for draw in (0, 1)] == [4, 2]
    assert scores[0].top_ids == logits[0].argsort(descending=True).tolist()
