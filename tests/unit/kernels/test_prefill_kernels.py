"""Which prefill kernel a layer gets, and that those for Hopper compile where there is no such device."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tests.triton_device import DEVICE  # isort: skip

from penstock.kernels.attention.interface import LayerAttention
from penstock.kernels.triton import hopper_prefill
from penstock.kernels.triton.paged_prefill import paged_prefill, prefill_tile
from penstock.kernels.triton.prefill_kernels import prefill_kernel

LAYER = LayerAttention(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)


def pool_of(layer: LayerAttention, dtype: torch.dtype, block_tokens: int = 16) -> torch.Tensor:
    return torch.empty(2, 1, block_tokens, layer.num_kv_heads, layer.head_dim, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(
    "layer",
    [
        replace(LAYER, window=99),
        replace(LAYER, softcap=30.0),
        replace(LAYER, head_dim=96),
        replace(LAYER, head_dim=256),
    ],
)
def test_layers_of_another_kind_get_the_kernel_that_runs_all(layer: LayerAttention) -> None:
    kernel = prefill_kernel(layer, pool_of(layer, torch.bfloat16))
    assert kernel.run is paged_prefill
    assert kernel.tile_tokens == prefill_tile(layer, torch.bfloat16).tokens(layer)


@pytest.mark.parametrize(("dtype", "block_tokens"), [(torch.float32, 16), (torch.bfloat16, 8)])
def test_pools_of_another_kind_get_the_kernel_that_runs_all(dtype: torch.dtype, block_tokens: int) -> None:
    assert prefill_kernel(LAYER, pool_of(LAYER, dtype, block_tokens)).run is paged_prefill


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "tokens"),
    [(8, 8, 128), (16, 8, 64), (32, 8, 32), (28, 4, 128), (28, 2, 64), (16, 1, 16)],
)
def test_a_tile_for_hopper_has_heads_that_divide_a_group(num_heads: int, num_kv_heads: int, tokens: int) -> None:
    assert hopper_prefill.tile_tokens(replace(LAYER, num_heads=num_heads, num_kv_heads=num_kv_heads)) == tokens


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "number"), [("prefill", "bf16"), ("prefill", "fp16"), ("gated", "bf16")])
def test_kernels_for_hopper_compile_and_their_products_overlap(kernel: str, number: str) -> None:
    # In a process of its own, since the interpreter of this one takes the place of the compiler.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.hopper_compilation", kernel, number]
    found = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr
    assert "registers" in found.stdout and "serialized" not in found.stdout
    assert "0 bytes spill stores" in found.stdout
