"""Where a step's tokens are, as host arrays."""

from penstock.engine.runner.layout import Layout, plain_decode
from penstock.engine.scheduler.step_plan import RowSlice


def test_single_tokens_that_are_followed_by_draws_are_a_plain_decode() -> None:
    found = plain_decode([RowSlice(8, 3, 40, 1, 1), RowSlice(9, 0, 7, 1, 1)])
    assert found is not None
    rows, positions = found
    assert rows.tolist() == [3, 0]
    assert positions.tolist() == [40, 7]


def test_a_longer_slice_is_no_plain_decode() -> None:
    assert plain_decode([RowSlice(8, 3, 40, 1, 1), RowSlice(9, 0, 0, 5, 1)]) is None


def test_a_token_that_is_not_followed_by_a_draw_is_no_plain_decode() -> None:
    assert plain_decode([RowSlice(8, 3, 40, 1, 0), RowSlice(9, 0, 7, 1, 1)]) is None


def test_tokens_are_packed_in_the_order_of_slices() -> None:
    layout = Layout.of([RowSlice(8, 3, 40, 1, 1), RowSlice(9, 0, 6, 3, 2, (5,)), RowSlice(10, 1, 0, 2, 0)])
    assert layout.rows.tolist() == [3, 0, 0, 0, 1, 1]
    assert layout.positions.tolist() == [40, 6, 7, 8, 0, 1]
    assert layout.query_starts.tolist() == [0, 1, 4, 6]
    assert layout.context_lens.tolist() == [41, 9, 2]
    assert layout.num_decodes == 1
    assert layout.sampled.tolist() == [0, 2, 3]
