"""Gated activations as a Triton kernel, against torch in float64."""

import pytest
import torch
from torch.nn import functional

from tests.triton_device import DEVICE, DTYPES, TOLERANCE, relative_error  # isort: skip

from penstock.kernels.triton.activation import gelu_tanh_gate, silu_gate


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [24, 1536])
def test_silu_of_the_gate_multiplies_the_up(dtype: torch.dtype, size: int) -> None:
    gate_up = (3 * torch.randn(3, 2 * size, device=DEVICE)).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert relative_error(silu_gate(gate_up), functional.silu(gate) * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_is_the_tanh_approximation(dtype: torch.dtype) -> None:
    gate_up = (3 * torch.randn(2, 2 * 48, device=DEVICE)).clamp(-6, 6).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert relative_error(gelu_tanh_gate(gate_up), functional.gelu(gate, approximate="tanh") * up) < TOLERANCE[dtype]


def test_a_large_negative_gate_closes() -> None:
    gate_up = torch.tensor([[-80.0, -60.0, 2.0, 3.0]], device=DEVICE)
    assert silu_gate(gate_up).abs().max() < 1e-20
    assert gelu_tanh_gate(torch.tensor([[-9.0, 5.0]], device=DEVICE)).abs().max() < 1e-20
