"""What kernels written in Gluon for Hopper share: where they run, and how many programs fill a device.

Knows devices and versions of Triton only.
"""

from functools import cache

import torch
import triton

# Gluon may change with every version: these compile our kernels.
_GLUON_VERSIONS = frozenset({"3.6", "3.7", "3.8"})


@cache
def runs_gluon(device: torch.device) -> bool:
    """Whether the kernels for Hopper run on a device."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) == (9, 0)
        and triton.__version__.rsplit(".", 1)[0] in _GLUON_VERSIONS
    )


@cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
