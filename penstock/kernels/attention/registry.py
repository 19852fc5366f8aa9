"""The attention backends, and the choice of one.

The table is in order of preference. Knows capabilities, not how a backend works.
"""

import torch

from penstock.errors import ConfigError
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


def choose_backend(
    name: str | None, layers: list[LayerAttention], device: torch.device, dtype: torch.dtype
) -> type[AttentionBackend]:
    """Return the backend called `name`, or the first that can run these layers.

    Raises ConfigError where there is no such backend or it cannot.
    """
    able = (other for other in BACKENDS.names if _can_run(BACKENDS.load(other), layers, device, dtype))
    if name is None:
        return BACKENDS.load(next(able))
    if name not in BACKENDS or not _can_run(BACKENDS.load(name), layers, device, dtype):
        right = f"backends that can run this model on {device.type} with {dtype}: {', '.join(able)}"
        raise ConfigError("--attention-backend", name, right)
    return BACKENDS.load(name)


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
