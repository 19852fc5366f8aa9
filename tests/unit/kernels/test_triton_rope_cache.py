"""Norm of heads, rotation and cache write as one Triton kernel, against the plain functions."""

import pytest
import torch
from torch import Tensor

from tests.triton_device import DEVICE, DTYPES, TOLERANCE, relative_error  # isort: skip

from penstock.kernels.triton.rope_cache import rotate_and_cache

TOKENS, BLOCKS, BLOCK_TOKENS = 5, 4, 4


def make_rotation(rotary_dim: int) -> Tensor:
    angles = torch.rand(TOKENS, 1, rotary_dim // 2, device=DEVICE) * 6
    return torch.polar(torch.full_like(angles, 1.25), angles)


def rotated(heads: Tensor, rotation: Tensor, norm: tuple[Tensor, float] | None) -> Tensor:
    """Queries and keys as they should be, in float64."""
    heads = heads.double()
    if norm is not None:
        heads = heads / (heads.square().mean(dim=-1, keepdim=True) + norm[1]).sqrt() * norm[0].double()
    rotary_dim = 2 * rotation.shape[-1]
    pairs = heads[..., :rotary_dim].unflatten(-1, (-1, 2)).contiguous()
    turned = torch.view_as_real(torch.view_as_complex(pairs) * rotation.to(torch.complex128)).flatten(-2)
    return torch.cat([turned, heads[..., rotary_dim:]], dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (8, 2), (9, 3), (20, 1)])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(32, 32), (80, 32), (64, 64)])
@pytest.mark.parametrize("with_norm", [False, True])
def test_heads_are_normed_and_rotated_and_cached(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, with_norm: bool
) -> None:
    heads = torch.randn(TOKENS, num_heads + 2 * num_kv_heads, head_dim, device=DEVICE).to(dtype)
    num_rotated = num_heads + num_kv_heads
    norm = (torch.randn(num_rotated, head_dim, device=DEVICE), 1e-6) if with_norm else None
    rotation = make_rotation(rotary_dim)
    wanted = rotated(heads[:, :num_rotated], rotation, norm)
    values = heads[:, num_rotated:].clone()
    pool = torch.full((2, BLOCKS, BLOCK_TOKENS, num_kv_heads, head_dim), 7.0, device=DEVICE, dtype=dtype)
    slots = torch.tensor([3, 14, 0, 9, 10], device=DEVICE)

    rotate_and_cache(heads, rotation, norm, slots, pool, num_heads=num_heads)

    assert relative_error(heads[:, :num_rotated], wanted) < TOLERANCE[dtype]
    keys, cached_values = pool.flatten(1, 2)
    assert relative_error(keys[slots], wanted[:, num_heads:]) < TOLERANCE[dtype]
    assert torch.equal(cached_values[slots], values)
    untouched = [slot for slot in range(BLOCKS * BLOCK_TOKENS) if slot not in slots.tolist()]
    assert (pool.flatten(1, 2)[:, untouched] == 7.0).all()


def test_a_slot_below_zero_is_not_written() -> None:
    heads = torch.randn(TOKENS, 6, 32, device=DEVICE)
    pool = torch.full((2, BLOCKS, BLOCK_TOKENS, 2, 32), 7.0, device=DEVICE)
    slots = torch.full((TOKENS,), -1, device=DEVICE)
    rotate_and_cache(heads, make_rotation(32), None, slots, pool, num_heads=2)
    assert (pool == 7.0).all()
