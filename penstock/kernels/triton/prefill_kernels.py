"""Which kernel runs the prefill of a layer.

Knows devices and what each kernel is made for.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.attention.interface import LayerAttention
from penstock.kernels.triton.hopper import runs_gluon
from penstock.kernels.triton.paged_prefill import paged_prefill, prefill_tile
from penstock.kernels.triton.sizes import ceil_divide


@dataclass(frozen=True, slots=True)
class PrefillKernel:
    """A launch for a list of tiles, which must be listed for so many tokens each."""

    tile_tokens: int
    tile_rows: int  # a query head of a token is a row
    run: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, LayerAttention], None]

    def num_programs(self, num_tokens: int, layer: LayerAttention) -> int:
        """How many tiles so many tokens fill, about."""
        return ceil_divide(num_tokens * layer.num_heads, self.tile_rows)


def prefill_kernel(layer: LayerAttention, pool: Tensor) -> PrefillKernel:
    """Return the fastest kernel that runs this layer on the pool's device."""
    if runs_gluon(pool.device):
        from penstock.kernels.triton import hopper_prefill

        if hopper_prefill.fits(layer, pool):
            return PrefillKernel(
                hopper_prefill.tile_tokens(layer), hopper_prefill.TILE_ROWS, hopper_prefill.hopper_prefill
            )
    tile = prefill_tile(layer, pool.dtype)
    return PrefillKernel(tile.tokens(layer), tile.rows, paged_prefill)
