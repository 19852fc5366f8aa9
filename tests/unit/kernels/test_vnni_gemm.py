"""Products in 8 bits as FBGEMM does them; its kernel is spelt out here, so that they can be tested on any machine."""

import pytest
import torch

from penstock.kernels import vnni_gemm
from penstock.kernels.vnni_gemm import VnniGemm


def kernel(x, weight, reduce_range):
    """Round to 256 levels between the least and the largest number of all rows, zero among them, and multiply."""
    assert not reduce_range
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    scale = (high - low) / 255
    zero = round(-low / scale)
    levels = (x / scale).round().add(zero).clamp(0, 255)
    return (levels - zero) * scale @ weight.T


@pytest.fixture(autouse=True)
def portable(monkeypatch):
    monkeypatch.setattr(vnni_gemm, "_pack", lambda levels, scales: levels.float() * scales.unsqueeze(1))
    made = VnniGemm.__init__

    def make(self, weight, **settings):
        made(self, weight, **settings)
        self._kernel = kernel

    monkeypatch.setattr(VnniGemm, "__init__", make)


def error(x, weight, *, fine):
    expected = x @ weight.T
    found = VnniGemm(weight, fine=fine).multiply(x)
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("num_rows", [1, 2, 33])
def test_products_are_close_and_fine_ones_closer(num_rows):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, 256, generator=generator) ** 3  # long tails
    weight = torch.randn(64, 256, generator=generator)
    coarse, fine = error(x, weight, fine=False), error(x, weight, fine=True)
    assert fine < 0.012 < coarse < 0.1  # what is left is the weights' own rounding


@pytest.mark.parametrize("fine", [False, True])
def test_no_row_spoils_anothers(fine):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 256, generator=generator)
    weight = torch.randn(64, 256, generator=generator)
    product = VnniGemm(weight, fine=fine)
    alone = product.multiply(x.clone())[0]
    beside = product.multiply(torch.stack([x[0], 1e4 * x[1]]))[0]
    torch.testing.assert_close(beside, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fine", [False, True])
def test_a_row_of_equal_numbers_is_no_division_by_zero(fine):
    weight = torch.eye(8, 16)
    found = VnniGemm(weight, fine=fine).multiply(torch.zeros(3, 16))
    torch.testing.assert_close(found, torch.zeros(3, 8))
