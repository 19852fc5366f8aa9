"""Kernels that are only compiled: nothing is written until they are launched."""

import torch

from tests.triton_device import DEVICE, TOLERANCE, relative_error  # isort: skip

from penstock.kernels.triton.launch import compiling_ahead
from penstock.kernels.triton.norm import add_rms_norm


def test_kernels_that_are_compiled_ahead_write_nothing_and_run_afterwards() -> None:
    x, residual = torch.randn(3, 96, device=DEVICE), torch.randn(3, 96, device=DEVICE)
    weight, before = torch.randn(96, device=DEVICE), residual.clone()
    with compiling_ahead():
        add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, before)
    add_rms_norm(x, residual, weight, 1e-5)
    assert relative_error(residual, (before + x).double()) < TOLERANCE[torch.float32]


def test_an_error_on_the_way_leaves_kernels_to_be_launched() -> None:
    x, residual = torch.randn(3, 96, device=DEVICE), torch.randn(3, 96, device=DEVICE)
    before = residual.clone()
    try:
        with compiling_ahead():
            raise ValueError
    except ValueError:
        add_rms_norm(x, residual, torch.ones(96, device=DEVICE), 1e-5)
    assert not torch.equal(residual, before)
