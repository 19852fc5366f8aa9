"""How the gated product on Hopper is cut into tiles."""

from hypothesis import given
from hypothesis import strategies as st

from tests.triton_device import DEVICE  # noqa: F401 # isort: skip

from penstock.kernels.triton.hopper_gated import columns_of_tiles


def waves(num_rows: int, columns: tuple[int, int], programs: int) -> float:
    """How long tiles of 128 rows take, in times of one with 128 columns."""
    row_tiles = -(-num_rows // 128)
    wide, narrow = columns
    return -(-wide * row_tiles // programs) + 0.75 * -(-narrow * row_tiles // programs)


def test_narrow_tiles_fill_a_last_wave() -> None:
    assert columns_of_tiles(256, 14336, 132) == (66, 62)
    assert waves(256, (66, 62), 132) == 1.75
    assert waves(256, (112, 0), 132) == 2.0


def test_full_waves_of_wide_tiles_stay_as_they_are() -> None:
    assert columns_of_tiles(128, 132 * 128, 132) == (132, 0)


@given(st.integers(1, 9000), st.integers(1, 200), st.integers(1, 200))
def test_tiles_cover_every_column_and_take_no_longer_than_wide_ones(
    num_rows: int, num_columns: int, programs: int
) -> None:
    size = num_columns * 128
    wide, narrow = columns_of_tiles(num_rows, size, programs)
    assert size <= wide * 128 + narrow * 96 < size + 96
    assert waves(num_rows, (wide, narrow), programs) <= waves(num_rows, (num_columns, 0), programs)
