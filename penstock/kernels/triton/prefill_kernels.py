"""Which kernel runs the prefill of a layer.

Knows devices, versions of Triton and what each kernel is made for.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from penstock.kernels.attention.interface import LayerAttention
from penstock.kernels.triton.paged_prefill import paged_prefill, prefill_tile

# The kernel for Hopper is written in Gluon, which may change with every version: these compile it.
_GLUON_VERSIONS = frozenset({"3.6", "3.7", "3.8"})


@dataclass(frozen=True, slots=True)
class PrefillKernel:
    """A launch for a list of tiles, which must be listed for so many tokens each."""

    tile_tokens: int
    run: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, LayerAttention], None]


def prefill_kernel(layer: LayerAttention, pool: Tensor) -> PrefillKernel:
    """Return the fastest kernel that runs this layer on the pool's device."""
    if _runs_gluon(pool.device):
        from penstock.kernels.triton import hopper_prefill

        if hopper_prefill.fits(layer, pool):
            return PrefillKernel(hopper_prefill.tile_tokens(layer), hopper_prefill.hopper_prefill)
    return PrefillKernel(prefill_tile(layer, pool.dtype).tokens(layer), paged_prefill)


def _runs_gluon(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) == (9, 0)
        and triton.__version__.rsplit(".", 1)[0] in _GLUON_VERSIONS
    )
