"""Draws against what the parameters promise, computed the slow and plain way."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels import sampling

VOCAB = 40


COUNT = 3000
# Five standard deviations of a share of one half, estimated from COUNT draws.
TOLERANCE = 5 * 0.5 / COUNT**0.5


def many(logits, temperature):
    """The same logits COUNT times, each with a seed of its own."""
    return logits.expand(COUNT, VOCAB), torch.full((COUNT,), temperature), torch.arange(COUNT), torch.full((COUNT,), 9)


def shares(tokens):
    return torch.bincount(tokens, minlength=VOCAB).double() / len(tokens)


def plain_filter(logits, temperature, top_k, top_p, min_p):
    """Sort, cut, renormalise: the definition."""
    ranked, order = torch.softmax(logits.double() / temperature, dim=-1).sort(descending=True)
    kept = torch.ones(VOCAB, dtype=torch.bool)
    if top_k:
        kept[top_k:] = False
    kept &= ranked >= min_p * ranked[0]
    ranked = torch.where(kept, ranked, 0.0)
    before = ranked.cumsum(0) - ranked
    ranked = torch.where(before < top_p * ranked.sum(), ranked, 0.0)
    result = torch.zeros(VOCAB, dtype=torch.float64)
    result[order] = ranked / ranked.sum()
    return result


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 100]),
    top_p=st.sampled_from([0.1, 0.7, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_filtered_draws_follow_the_filtered_distribution(seed, temperature, top_k, top_p, min_p):
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    tokens = sampling.draw_filtered(
        *many(logits, temperature),
        torch.full((COUNT,), top_k),
        torch.full((COUNT,), top_p),
        torch.full((COUNT,), min_p),
    )
    expected = plain_filter(logits, temperature, top_k, top_p, min_p)
    assert (shares(tokens) - expected).abs().max() < TOLERANCE
    assert not (shares(tokens) > 0)[expected == 0].any(), "what the filters drop is never drawn"


def test_more_candidates_than_the_first_look_are_found():
    vocab = 5000
    zero = torch.zeros(1, dtype=torch.int64)
    tokens = {
        int(
            sampling.draw_filtered(
                torch.zeros(1, vocab), torch.ones(1), zero + seed, zero, zero, torch.tensor([0.99]), torch.zeros(1)
            )
        )
        for seed in range(40)
    }
    assert len(tokens) > 30
    assert max(tokens) > sampling._TOP_CANDIDATES


@pytest.mark.parametrize("temperature", [1e-5, 1e-38, 1e-45, 0.0])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (0, 0.5, 0.0), (5, 1.0, 0.0), (0, 1.0, 0.5)])
def test_the_least_temperatures_take_the_best_token_whatever_the_filter(temperature, top_k, top_p, min_p):
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(6)) * 20
    logits[:, 3] = float("-inf")
    draws = torch.full((4,), temperature), torch.arange(4), torch.arange(4)
    filters = torch.full((4,), top_k), torch.full((4,), top_p), torch.full((4,), min_p)
    assert sampling.draw_filtered(logits, *draws, *filters).tolist() == logits.argmax(dim=-1).tolist()


def test_plain_draws_follow_the_distribution():
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    tokens = sampling.draw(*many(logits, 0.7))
    assert (shares(tokens) - torch.softmax(logits.double() / 0.7, dim=-1)).abs().max() < TOLERANCE


def test_the_last_bits_of_the_logits_do_not_change_the_draw():
    vocab, count = 20000, 200
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(4))
    noisy = logits + 1e-6 * torch.randn(count, vocab, generator=torch.Generator().manual_seed(5))
    settings = (torch.ones(count), torch.arange(count), torch.arange(count))
    assert (sampling.draw(logits, *settings) != sampling.draw(noisy, *settings)).sum() <= 1


def test_impossible_tokens_are_never_drawn():
    logits = torch.full((50, VOCAB), float("-inf"))
    logits[:, 7] = 1.0
    drawn = sampling.draw(logits, torch.ones(50), torch.arange(50), torch.zeros(50, dtype=torch.int64))
    assert drawn.tolist() == [7] * 50


def test_a_broken_row_still_gives_a_token():
    logits = torch.full((1, VOCAB), float("nan"))
    zero = torch.zeros(1, dtype=torch.int64)
    assert 0 <= int(sampling.draw(logits, torch.ones(1), zero, zero)) < VOCAB


def test_noise_depends_on_key_and_token_and_has_its_distribution():
    keys, tokens = torch.tensor([1, 1, 2, -5, 1 << 40]), torch.tensor([10, 11, 10, 10, 10])
    found = sampling.noise(keys, tokens)
    assert len(set(found.tolist())) == 5
    assert torch.equal(found, sampling.noise(keys, tokens))
    many = sampling.noise(torch.full((20000,), -42), torch.arange(20000))
    shares = torch.exp(-torch.exp(-many.double()))
    assert (torch.histc(shares, 10, 0, 1) / 20000 - 0.1).abs().max() < 0.01


def test_noise_of_neighbouring_seeds_and_positions_is_unrelated():
    def noise_of(seed, position):
        settings = torch.tensor([seed]), torch.tensor([position])
        return sampling.noise(sampling._keys(*settings), torch.arange(20000))

    all_noise = torch.stack([noise_of(7, 100), noise_of(8, 100), noise_of(7, 101), noise_of(7, 100).roll(1)])
    assert (torch.corrcoef(all_noise) - torch.eye(4)).abs().max() < 5 / 20000**0.5


def test_a_temperature_next_to_zero_takes_the_best_token():
    logits = torch.tensor([[50.0, 80.0, 70.0]])
    zero = torch.zeros(1, dtype=torch.int64)
    assert sampling.draw(logits, torch.tensor([1e-38]), zero, zero).tolist() == [1]


def test_penalties_lower_what_is_there():
    logits = torch.tensor([[2.0, -2.0, 2.0, 0.5]])
    counts = torch.tensor([[2, 1, 0, 0]], dtype=torch.int32)
    seen = torch.tensor([[True, True, True, False]])
    found = sampling.penalise(logits, counts, seen, torch.tensor([0.5]), torch.tensor([0.25]), torch.tensor([2.0]))
    assert found.tolist() == [[1.0 - 0.5 - 0.5, -4.0 - 0.5 - 0.25, 1.0, 0.5]]


def test_a_broken_row_shows_in_its_best_logit():
    logits = torch.zeros(2, VOCAB)
    logits[1, 3] = float("nan")
    best, _ = sampling.best(logits)
    assert torch.isfinite(best).tolist() == [True, False]
