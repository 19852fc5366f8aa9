"""Products with a handful of rows as a Triton kernel, against torch in float64."""

import pytest
import torch

from tests.triton_device import DEVICE, DTYPES, TOLERANCE, relative_error  # isort: skip

from penstock.kernels.triton.few_rows import Band, FewRowsProduct, choose_band

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


@pytest.mark.parametrize(
    ("width", "depth"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (1024, 3072)]
)
def test_a_chosen_band_covers_the_weight(width: int, depth: int) -> None:
    band = choose_band(width, depth)
    assert band is not None
    assert width % band.rows == 0
    assert depth % (band.parts * band.depth) == 0
    assert width // band.rows * band.parts >= 128


def test_a_weight_that_no_band_covers_has_none() -> None:
    assert choose_band(49, 100) is None
