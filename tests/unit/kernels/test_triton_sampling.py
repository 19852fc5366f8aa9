"""Sampling as Triton kernels, against `kernels.sampling` and against the distributions that were asked for."""

import pytest
import torch
from torch import Tensor

from tests.triton_device import DEVICE  # isort: skip

from penstock.kernels import sampling as plain
from penstock.kernels.triton import sampling

VOCAB = 2500  # three blocks, the last not full
# The interpreter adds up one token at a time: few tokens and few draws there.
SMALL = 60
DRAWS = 400 if DEVICE == "cuda" else 10


def random_logits(num_rows: int, seed: int = 0) -> Tensor:
    return (3 * torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed))).to(DEVICE)


def numbers(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=DEVICE)


def integers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def draw(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    workspace = sampling.SamplingWorkspace.of(len(logits), logits.device)
    found = sampling.sample(logits, temperatures, seeds, positions, workspace)
    assert not workspace.arrivals.any()
    return found


def filtered(logits: Tensor, num_draws: int, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Draw many times from one row at temperature one."""
    rows = logits.expand(num_draws, -1).contiguous()
    return sampling.sample_filtered(
        rows,
        numbers([1.0] * num_draws),
        integers(list(range(num_draws))),
        integers([7] * num_draws),
        integers([top_k] * num_draws),
        numbers([top_p] * num_draws),
        numbers([min_p] * num_draws),
    )[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_temperature_zero_takes_the_best_token(dtype: torch.dtype) -> None:
    logits = random_logits(4).to(dtype)
    tokens, best = draw(logits, numbers([0.0] * 4), integers([1] * 4), integers([1] * 4))
    assert tokens.tolist() == logits.argmax(dim=-1).tolist()
    assert best.tolist() == logits.float().amax(dim=-1).tolist()


def test_the_first_of_equally_good_tokens_is_taken() -> None:
    logits = torch.zeros(1, VOCAB, device=DEVICE)
    logits[0, [900, 1500, 2499]] = 5.0
    assert draw(logits, numbers([0.0]), integers([1]), integers([1]))[0].tolist() == [900]


def test_a_draw_is_the_one_that_the_cpu_makes_of_the_same_seed_and_position() -> None:
    logits = random_logits(24)
    temperatures = numbers([0.3, 0.7, 1.0, 2.0] * 6)
    seeds = integers([0, 1, -5, 2**62, -(2**63), 77] * 4)
    positions = integers(list(range(100, 124)))
    expected = plain.draw(logits, temperatures, seeds, positions)
    found, best = draw(logits, temperatures, seeds, positions)
    assert found.tolist() == expected.tolist()
    assert best.tolist() == logits.amax(dim=-1).tolist()


def test_the_last_bits_of_the_logits_do_not_change_the_draw() -> None:
    count = 8
    logits = random_logits(count)
    noisy = logits + 1e-6 * random_logits(count, seed=1)
    settings = (numbers([1.0] * count), integers(list(range(count))), integers([3] * count))
    assert draw(logits, *settings)[0].tolist() == draw(noisy, *settings)[0].tolist()


def test_draws_follow_the_distribution() -> None:
    count, vocab = 12 * DRAWS, 4
    row = torch.linspace(0.0, 1.5, vocab, device=DEVICE)
    temperature = 0.8
    found, _ = draw(
        row.expand(count, -1).contiguous(),
        numbers([temperature] * count),
        integers(list(range(count))),
        integers([5] * count),
    )
    expected = torch.softmax(row.double() / temperature, dim=-1) * count
    seen = torch.bincount(found, minlength=vocab).double()
    # Chi-square with three degrees of freedom passes 16.3 once in a thousand.
    assert float(((seen - expected).square() / expected).sum()) < 16.3


def test_a_temperature_next_to_zero_takes_the_best_token() -> None:
    logits = 30 * random_logits(2)
    found, _ = draw(logits, numbers([1e-30, 1e-7]), integers([1, 2]), integers([1, 2]))
    assert found.tolist() == logits.argmax(dim=-1).tolist()


def test_a_temperature_next_to_zero_takes_the_best_token_behind_a_filter() -> None:
    logits = 30 * random_logits(2)[:, :SMALL].contiguous()
    settings = numbers([1e-38, 1e-45]), integers([1, 2]), integers([1, 2])
    for top_k, top_p, min_p in ((0, 0.5, 0.0), (5, 1.0, 0.0), (0, 1.0, 0.5)):
        filters = integers([top_k] * 2), numbers([top_p] * 2), numbers([min_p] * 2)
        assert sampling.sample_filtered(logits, *settings, *filters)[0].tolist() == logits.argmax(dim=-1).tolist()


def test_greedy_and_random_rows_mix() -> None:
    logits = random_logits(2)
    tokens, _ = draw(logits, numbers([0.0, 1.0]), integers([3, 3]), integers([5, 5]))
    alone, _ = draw(logits[1:], numbers([1.0]), integers([3]), integers([5]))
    assert tokens.tolist() == [int(logits[0].argmax()), int(alone)]


def test_banned_tokens_are_never_drawn() -> None:
    logits = torch.full((6, VOCAB), float("-inf"), device=DEVICE)
    logits[:, 2321] = 1.0
    tokens, best = draw(logits, numbers([0.0, 1.0] * 3), integers([1] * 6), integers(list(range(6))))
    assert tokens.tolist() == [2321] * 6
    assert best.tolist() == [1.0] * 6
    assert filtered(logits[0], 1, top_k=5, top_p=0.9).tolist() == [2321]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_row_shows_in_its_best_logit(temperature: float) -> None:
    logits = random_logits(2)
    logits[1, 1300] = float("nan")
    settings = (numbers([temperature] * 2), integers([1, 1]), integers([1, 1]))
    best = draw(logits, *settings)[1]
    assert best.isfinite().tolist() == [True, False]
    unfiltered = (integers([0, 0]), numbers([1.0, 1.0]), numbers([0.0, 0.0]))
    assert sampling.sample_filtered(logits, *settings, *unfiltered)[1].isfinite().tolist() == [True, False]


def test_filters_that_filter_nothing_change_nothing() -> None:
    logits = random_logits(3)
    settings = (numbers([0.8] * 3), integers(list(range(3))), integers([9] * 3))
    unfiltered = (integers([0] * 3), numbers([1.0] * 3), numbers([0.0] * 3))
    found, best = sampling.sample_filtered(logits, *settings, *unfiltered)
    assert found.tolist() == draw(logits, *settings)[0].tolist()
    assert best.tolist() == logits.amax(dim=-1).tolist()


def test_top_k_keeps_the_k_most_likely() -> None:
    logits = torch.full((SMALL,), -20.0, device=DEVICE)
    logits[[5, 22, 41, 48]] = numbers([1.0, 1.2, 1.1, 0.9])
    assert set(filtered(logits, DRAWS, top_k=3).tolist()) == {5, 22, 41}


def test_top_k_keeps_k_of_equals_the_first() -> None:
    logits = torch.zeros(SMALL, device=DEVICE)
    logits[30] = 0.5
    assert set(filtered(logits, DRAWS, top_k=3).tolist()) == {0, 1, 30}


def test_top_k_of_one_is_greedy() -> None:
    logits = random_logits(1)[0, :SMALL]
    assert set(filtered(logits, 2, top_k=1).tolist()) == {int(logits.argmax())}


def test_top_p_keeps_the_fewest_that_reach_the_mass() -> None:
    logits = torch.full((SMALL,), -30.0, device=DEVICE)
    logits[[10, 20, 30, 40]] = torch.log(numbers([0.4, 0.1, 0.3, 0.2]))
    assert set(filtered(logits, DRAWS, top_p=0.65).tolist()) == {10, 30}
    assert set(filtered(logits, DRAWS, top_p=0.75).tolist()) == {10, 30, 40}
    assert set(filtered(logits, DRAWS, top_p=0.01).tolist()) == {10}


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    logits = torch.full((SMALL,), -30.0, device=DEVICE)
    logits[[10, 20, 30, 40]] = torch.log(numbers([0.4, 0.1, 0.3, 0.2]))
    # Of 0.4 and 0.3, the first alone holds 0.571.
    assert set(filtered(logits, DRAWS, top_k=2, top_p=0.57).tolist()) == {10}
    assert set(filtered(logits, DRAWS, top_k=2, top_p=0.58).tolist()) == {10, 30}


def test_min_p_drops_what_is_much_less_likely_than_the_best() -> None:
    logits = torch.full((SMALL,), -30.0, device=DEVICE)
    logits[[10, 20, 30, 40]] = torch.log(numbers([0.4, 0.1, 0.3, 0.2]))
    assert set(filtered(logits, DRAWS, min_p=0.45).tolist()) == {10, 30, 40}


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(9, 1.0, 0.0), (0, 0.8, 0.0), (12, 0.9, 0.0), (0, 1.0, 0.1), (10, 0.7, 0.05)]
)
def test_a_filtered_draw_comes_from_the_filtered_distribution(top_k: int, top_p: float, min_p: float) -> None:
    logits = 0.4 * random_logits(1, seed=4)[0, :SMALL]
    found = filtered(logits, DRAWS, top_k=top_k, top_p=top_p, min_p=min_p)
    probabilities = torch.softmax(logits.double(), dim=-1)
    order = probabilities.argsort(descending=True)
    ranked = probabilities[order]
    if top_k:
        ranked[top_k:] = 0
    ranked[ranked < min_p * ranked[0]] = 0
    ranked[ranked.cumsum(0) - ranked >= top_p * ranked.sum()] = 0
    kept = order[ranked > 0]
    assert set(found.tolist()) <= set(kept.tolist())
    # The most likely token comes about as often as it should.
    share = float(ranked[0] / ranked.sum())
    spread = (share * (1 - share) / len(found)) ** 0.5
    assert abs(float((found == order[0]).double().mean()) - share) <= 5 * spread


def test_top_p_looks_beyond_one_block() -> None:
    logits = torch.full((VOCAB,), -30.0, device=DEVICE)
    logits[[4, 2400]] = numbers([0.0, 0.1])
    assert filtered(logits, 1, top_p=0.4).tolist() == [2400]


def test_top_p_after_top_k_counts_the_whole_weight_of_the_last_that_stayed() -> None:
    logits = torch.full((SMALL,), -30.0, device=DEVICE)
    logits[[10, 20, 30]] = torch.log(numbers([0.5, 0.3, 0.001]))
    # Of 0.5 and 0.3, the first alone holds 0.625.
    assert set(filtered(logits, DRAWS, top_k=2, top_p=0.62).tolist()) == {10}
    assert set(filtered(logits, DRAWS, top_k=2, top_p=0.63).tolist()) == {10, 20}
