"""The attention backends, and which of them can run a model.

The table is in order of preference. Knows capabilities, not how a backend works.
"""

import torch

from penstock.kernels.attention.interface import AttentionBackend, LayerAttention
from penstock.registry import Registry

BACKENDS: Registry[type[AttentionBackend]] = Registry(
    "attention backend",
    {
        "triton": "penstock.kernels.attention.triton_paged:TritonPagedAttention",
        "cpu": "penstock.kernels.attention.cpu:CpuAttention",
        "reference": "penstock.kernels.attention.reference:ReferenceAttention",
    },
)


def able_backends(layers: list[LayerAttention], device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """Names of the backends that can run these layers, best first."""
    return tuple(name for name in BACKENDS.names if _can_run(BACKENDS.load(name), layers, device, dtype))


def _can_run(
    backend: type[AttentionBackend], layers: list[LayerAttention], device: torch.device, dtype: torch.dtype
) -> bool:
    able = backend.supports
    return (
        device.type in able.devices
        and dtype in able.dtypes
        and (able.head_dims is None or all(layer.head_dim in able.head_dims for layer in layers))
        and (able.window or all(layer.window is None for layer in layers))
        and (able.softcap or all(layer.softcap is None for layer in layers))
    )
