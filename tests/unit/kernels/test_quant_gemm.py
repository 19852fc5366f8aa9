"""Products with quantised weights: close to float32, and the same for a row whatever runs beside it."""

import pytest
import torch
from torch import Tensor

from penstock.kernels.quant_gemm import (
    GROUP,
    MAX_KEPT_ROWS,
    FourBitGemm,
    Int8Gemm,
    four_bit_supported,
    int8_supported,
)
from penstock.kernels.vnni_gemm import VnniGemm, vnni_supported

needs_four_bits = pytest.mark.skipif(not four_bit_supported(), reason="this CPU or torch has no 4-bit kernel")
needs_vnni = pytest.mark.skipif(not vnni_supported(), reason="this CPU or torch has no VNNI kernel")
needs_int8 = pytest.mark.skipif(not int8_supported(), reason="this CPU or torch has no fast 8-bit kernel")

SHAPES = [(96, 64), (100, 96), (7, 32), (960, 576)]
ROWS = [1, 3, 8, 17, 40, 64, 65, 200]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative_error(found: Tensor, x: Tensor, weight: Tensor) -> float:
    exact = x.double() @ weight.double().T
    return float((found.double() - exact).norm() / exact.norm())


def four_bit(out: int, width: int, *, with_offsets: bool = True) -> tuple[FourBitGemm, Tensor]:
    """A product, and the matrix that it stands for."""
    generator = torch.Generator().manual_seed(1)
    levels = torch.randint(0, 16, (out, width), dtype=torch.uint8, generator=generator)
    scales = normal(out, width // GROUP, seed=2).abs().to(torch.bfloat16).float()
    offsets = normal(out, width // GROUP, seed=3) if with_offsets else None
    groups = (levels.float() - 8).unflatten(1, (-1, GROUP)) * scales.unsqueeze(2)
    if offsets is not None:
        groups = groups + offsets.unsqueeze(2)
    return FourBitGemm(levels, scales, offsets), groups.flatten(1)


@needs_four_bits
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize(("out", "width"), SHAPES)
@pytest.mark.parametrize("with_offsets", [False, True])
def test_four_bit_products_are_as_close_as_rounded_activations_allow(
    out: int, width: int, rows: int, with_offsets: bool
) -> None:
    gemm, weight = four_bit(out, width, with_offsets=with_offsets)
    x = normal(rows, width)
    assert relative_error(gemm.multiply(x), x, weight) < 0.012


@needs_four_bits
@pytest.mark.parametrize("with_offsets", [False, True])
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_four_bit_rows_do_not_depend_on_their_batch(out: int, width: int, with_offsets: bool) -> None:
    gemm, weight = four_bit(out, width, with_offsets=with_offsets)
    x = normal(33, width) * torch.logspace(-3, 3, 33).unsqueeze(1)
    alone = torch.cat([gemm.multiply(row.unsqueeze(0)) for row in x])
    # Terms cancel, so a sum's error is measured by its terms: their order may differ, their levels (1e-3) may not.
    terms = x.abs() @ weight.abs().T
    assert float(((gemm.multiply(x) - alone).abs() / terms).max()) < 1e-6


@needs_int8
@pytest.mark.parametrize("keep_packed", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_int8_products_are_close(out: int, width: int, rows: int, keep_packed: bool) -> None:
    weight, x = normal(out, width, seed=1), normal(rows, width)
    gemm = Int8Gemm(weight, keep_packed=keep_packed)
    assert relative_error(gemm.multiply(x), x, weight) < 0.02


@needs_int8
@pytest.mark.parametrize("keep_packed", [False, True])
def test_int8_rows_do_not_depend_on_their_batch(keep_packed: bool) -> None:
    gemm = Int8Gemm(normal(48, 64, seed=1), keep_packed=keep_packed)
    x = normal(100, 64) * torch.logspace(-3, 3, 100).unsqueeze(1)
    whole = gemm.multiply(x)
    for size in (1, 7, 16, MAX_KEPT_ROWS, 90):
        parts = torch.cat([gemm.multiply(part) for part in x.split(size)])
        assert float(((parts - whole).norm(dim=1) / whole.norm(dim=1)).max()) < 1e-5


@needs_int8
def test_an_outlier_spoils_only_its_own_piece_of_a_row() -> None:
    weight, x = normal(48, 1024, seed=1), normal(100, 1024)
    gemm = Int8Gemm(weight, keep_packed=False)
    clean = gemm.multiply(x) - x @ weight.T
    x[:, 300] = 1000.0
    # The outlier's own product is left out: its error is the weight's, not the row's.
    spoiled = gemm.multiply(x) - x @ weight.T
    spoiled = spoiled - spoiled.mean(0)
    # 512 of the 1024 columns are rounded in steps of a 253rd of the outlier, and no more.
    expected = 1000 / 253 / 12**0.5 * 512**0.5
    assert float(clean.std()) < 0.5
    assert 0.7 * expected < float(spoiled.std()) < 1.1 * expected


@needs_int8
@pytest.mark.parametrize("keep_packed", [False, True])
def test_zero_activations_stay_zero_beside_an_outlier(keep_packed: bool) -> None:
    weight = torch.randint(-127, 127, (48, 64), generator=torch.Generator().manual_seed(1)).float()
    weight[:, 5] = 127.0  # so that 8 bits hold the matrix exactly
    x = torch.zeros(2, 64)
    x[0, 0], x[1, 5] = 100.3, -0.7
    found = Int8Gemm(weight, keep_packed=keep_packed).multiply(x)
    torch.testing.assert_close(found, x @ weight.T, rtol=1e-5, atol=1e-4)


@needs_int8
@pytest.mark.parametrize("keep_packed", [False, True])
def test_rows_of_zeros_and_of_equal_numbers_are_no_trouble(keep_packed: bool) -> None:
    weight = normal(48, 64, seed=1)
    weight[3] = 0.0
    gemm = Int8Gemm(weight, keep_packed=keep_packed)
    x = torch.stack([torch.zeros(64), torch.full((64,), 3.0)])
    found = gemm.multiply(x)
    torch.testing.assert_close(found[0], torch.zeros(48))
    torch.testing.assert_close(found[1], 3.0 * weight.sum(1), rtol=0.02, atol=0.5)
    torch.testing.assert_close(found[:, 3], torch.zeros(2))


@needs_int8
def test_packing_leaves_the_chosen_quantisation_engine_as_it_was() -> None:
    before = torch.backends.quantized.engine
    Int8Gemm(normal(48, 64), keep_packed=True)
    assert torch.backends.quantized.engine == before


@needs_vnni
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_vnni_products_are_close(out: int, width: int, rows: int) -> None:
    weight, x = normal(out, width, seed=1), normal(rows, width)
    assert relative_error(VnniGemm(weight).multiply(x), x, weight) < 0.02


@needs_vnni
def test_vnni_rows_do_not_spoil_each_other() -> None:
    weight = normal(48, 64, seed=1)
    x = normal(100, 64) * torch.logspace(-3, 3, 100).unsqueeze(1)
    found = VnniGemm(weight).multiply(x)
    for index in (0, 50, 99):
        assert relative_error(found[index : index + 1], x[index : index + 1], weight) < 0.03


@needs_vnni
def test_vnni_products_do_not_saturate() -> None:
    weight = torch.full((8, 64), 1.0)
    x = torch.cat([torch.full((1, 64), 3.0), torch.full((1, 64), -2.0)])
    torch.testing.assert_close(VnniGemm(weight).multiply(x), x @ weight.T, rtol=0.02, atol=0.0)
