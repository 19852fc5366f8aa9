"""RMS norms as a Triton kernel, against the formula in float64."""

import pytest
import torch
from torch import Tensor

from tests.triton_device import DEVICE, DTYPES, TOLERANCE, relative_error  # isort: skip

from penstock.kernels.triton.norm import add_rms_norm, rms_norm


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 80, 576])
def test_a_row_is_divided_by_its_root_mean_square(dtype: torch.dtype, size: int) -> None:
    x = torch.randn(3, size, device=DEVICE).to(dtype)
    weight = torch.randn(size, device=DEVICE)
    assert relative_error(rms_norm(x, weight, 1e-5), exact_norm(x, weight, 1e-5)) < TOLERANCE[dtype]


def test_heads_have_weights_of_their_own() -> None:
    packed = torch.randn(3, 6, 32, device=DEVICE)
    weight = torch.randn(4, 32, device=DEVICE)
    heads = packed[:, :4]  # not contiguous, as in a fused projection
    assert relative_error(rms_norm(heads, weight, 1e-6), exact_norm(heads, weight, 1e-6)) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_update_is_added_to_the_stream_in_place(dtype: torch.dtype) -> None:
    x = torch.randn(3, 96, device=DEVICE).to(dtype)
    residual = torch.randn(3, 96, device=DEVICE).to(dtype)
    weight = torch.randn(96, device=DEVICE)
    summed = x + residual
    normed = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, summed)
    assert relative_error(normed, exact_norm(summed, weight, 1e-5)) < TOLERANCE[dtype]


def test_no_rows_give_no_rows() -> None:
    assert rms_norm(torch.empty(0, 64, device=DEVICE), torch.ones(64, device=DEVICE), 1e-5).shape == (0, 64)
