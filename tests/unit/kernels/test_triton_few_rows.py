"""Products with a handful of rows as a Triton kernel, against torch in float64."""

import pytest
import torch

from tests.triton_device import DEVICE, DTYPES, TOLERANCE, relative_error  # isort: skip

from penstock.kernels.triton.few_rows import Band, FewRowsProduct, RowBand, choose_band, choose_row_band

ROW_BAND = RowBand(rows=8, depth=64, num_warps=1, num_stages=3)
HALF = [dtype for dtype in DTYPES if dtype.itemsize == 2]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("num_rows", [1, 5, 16])
def test_whole_and_divided_bands_give_the_product(num_rows: int, parts: int, dtype: torch.dtype) -> None:
    x = torch.randn(num_rows, 256, device=DEVICE).to(dtype)
    weight = torch.randn(48, 256, device=DEVICE).to(dtype)
    product = FewRowsProduct(weight, Band(rows=16, depth=32, parts=parts, num_warps=1, num_stages=3))
    expected = x.double() @ weight.double().T
    for _ in range(2):  # the second finds the workspace as the first left it
        assert relative_error(product.multiply(x), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("row_band", [None, ROW_BAND])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_product_may_be_added_to_what_is_there(
    num_rows: int, row_band: RowBand | None, parts: int, dtype: torch.dtype
) -> None:
    x = torch.randn(num_rows, 256, device=DEVICE).to(dtype)
    weight = torch.randn(48, 256, device=DEVICE).to(dtype)
    total = 20 * torch.randn(num_rows, 48, device=DEVICE).to(dtype)
    expected = total.double() + x.double() @ weight.double().T
    FewRowsProduct(weight, Band(16, 32, parts, num_warps=1, num_stages=3), row_band).add(x, total)
    assert relative_error(total, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", HALF)
def test_one_row_may_be_normed_on_its_way_in(dtype: torch.dtype) -> None:
    x = 30 * torch.randn(1, 256, device=DEVICE).to(dtype)
    weight = torch.randn(48, 256, device=DEVICE).to(dtype)
    norm = torch.rand(256, device=DEVICE)
    product = FewRowsProduct(weight, Band(16, 32, 1, num_warps=1, num_stages=3), ROW_BAND)
    assert product.norms(1) and not product.norms(2)
    normed = x.double() * (x.double().square().mean() + 0.5).rsqrt() * norm.double()
    assert relative_error(product.multiply_normed(x, norm, 0.5), normed @ weight.double().T) < TOLERANCE[dtype]


@pytest.mark.parametrize(("width", "depth"), [(5120, 2048), (2048, 4096), (6144, 1024), (1024, 3072), (2048, 1536)])
def test_a_chosen_band_of_one_row_covers_the_weight(width: int, depth: int) -> None:
    band = choose_row_band(width, depth)
    assert band is not None
    assert width % band.rows == 0 and depth % band.depth == 0
    assert band.warm_lines * 64 <= depth


@pytest.mark.parametrize(
    ("width", "depth"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (1024, 3072)]
)
def test_a_chosen_band_covers_the_weight(width: int, depth: int) -> None:
    band = choose_band(width, depth)
    assert band is not None
    assert width % band.rows == 0
    assert depth % (band.parts * band.depth) == 0
    assert width // band.rows * band.parts >= 128


def test_large_weights_have_no_band_of_one_row() -> None:
    assert choose_row_band(4096, 14336) is None


def test_a_weight_that_no_band_covers_has_none() -> None:
    assert choose_band(49, 100) is None
