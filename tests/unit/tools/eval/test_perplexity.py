import math
from collections.abc import Sequence

import pytest

from penstock.tools.eval.perplexity import perplexity


def even_odds(sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """A model that gives every token one chance in eight."""
    return [[math.log(1 / 8)] * (len(sequence) - 1) for sequence in sequences]


def test_a_model_that_guesses_among_eight_has_a_perplexity_of_eight() -> None:
    assert perplexity(list(range(100)), even_odds, window_tokens=10) == pytest.approx(8.0)


def test_windows_follow_one_another_and_leave_the_rest_out() -> None:
    seen: list[list[int]] = []

    def score(sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        seen.extend(list(sequence) for sequence in sequences)
        return even_odds(sequences)

    perplexity(list(range(11)), score, window_tokens=4)
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_every_token_counts_the_same() -> None:
    def score(sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[-1.0, -3.0] for _ in sequences]

    assert perplexity(list(range(6)), score, window_tokens=3) == pytest.approx(math.exp(2.0))


def test_no_more_windows_are_scored_than_asked_for() -> None:
    counts: list[int] = []

    def score(sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        counts.append(len(sequences))
        return even_odds(sequences)

    perplexity(list(range(100)), score, window_tokens=10, max_windows=3)
    assert counts == [3]


@pytest.mark.parametrize(("num_tokens", "window"), [(9, 10), (100, 1)])
def test_a_text_without_a_whole_window_is_refused(num_tokens: int, window: int) -> None:
    with pytest.raises(ValueError, match="window"):
        perplexity(list(range(num_tokens)), even_odds, window_tokens=window)
