"""Programmatic dependent launch: a kernel is set up while the one before it still runs.

A kernel that is launched with `overlap_options` must call `wait_for_inputs` before it touches anything that an earlier
kernel may write or read: that returns once all earlier kernels of the stream are done. Every kernel that takes part
waits, so the order holds along a whole chain. One thing may be touched earlier: what was written before the launch
right before this one, where that one waits too. Knows devices only.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Wait for the kernels before this one, then let the one after it be set up.

    In this order: the one after starts once all that came before this one is done. Setting it up earlier than that was
    measured to cost more than it saves.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def warm_cache(at):
    """Ask for the line that each pointer is in, without waiting for it."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


def overlap_options(tensor: Tensor) -> dict[str, Any]:
    """Options for a launch on the tensor's device: the kernel's OVERLAP, and what the launcher must know."""
    if tensor.is_cuda and _can_overlap(tensor.device):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


@cache
def _can_overlap(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
