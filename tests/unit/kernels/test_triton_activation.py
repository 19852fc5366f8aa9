"""Gated activations as a Triton kernel, against torch in float64."""

import pytest
import torch
from torch.nn import functional

from tests.triton_device import DEVICE, DTYPES, TOLERANCE, relative_error  # isort: skip

from penstock.kernels.norm_rope import RowScale
from penstock.kernels.triton.activation import gate


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [24, 1536])
def test_silu_of_the_gate_multiplies_the_up(dtype: torch.dtype, size: int) -> None:
    gate_up = (3 * torch.randn(3, 2 * size, device=DEVICE)).to(dtype)
    gates, ups = gate_up.double().chunk(2, dim=-1)
    assert relative_error(gate(gate_up, gelu=False), functional.silu(gates) * ups) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_is_the_tanh_approximation(dtype: torch.dtype) -> None:
    gate_up = (3 * torch.randn(2, 2 * 48, device=DEVICE)).clamp(-6, 6).to(dtype)
    gates, ups = gate_up.double().chunk(2, dim=-1)
    expected = functional.gelu(gates, approximate="tanh") * ups
    assert relative_error(gate(gate_up, gelu=True), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_a_product_left_unscaled_are_scaled_first(dtype: torch.dtype) -> None:
    rows = (40 * torch.randn(3, 72, device=DEVICE)).to(dtype)
    gate_up = (60 * torch.randn(3, 2 * 24, device=DEVICE)).to(dtype)
    factors = (rows.double().square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt()
    gates, ups = (gate_up.double() * factors).chunk(2, dim=-1)
    found = gate(gate_up, gelu=False, scale=RowScale(rows, 1e-5))
    assert relative_error(found, functional.silu(gates) * ups) < TOLERANCE[dtype]


def test_a_large_negative_gate_closes() -> None:
    gate_up = torch.tensor([[-80.0, -60.0, 2.0, 3.0]], device=DEVICE)
    assert gate(gate_up, gelu=False).abs().max() < 1e-20
    assert gate(torch.tensor([[-9.0, 5.0]], device=DEVICE), gelu=True).abs().max() < 1e-20
