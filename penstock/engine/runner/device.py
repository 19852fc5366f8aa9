"""What the device under us is and can do: the facts that `engine.config.resolve` chooses from."""

import platform

import torch

from penstock import machine
from penstock.engine.config import DeviceFacts
from penstock.errors import ConfigError
from penstock.kernels.attention.registry import able_backends
from penstock.models.decoder import attention_layers
from penstock.models.spec import ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def probe(wanted: str, spec: ModelSpec) -> DeviceFacts:
    """Find out about the device that `--device` names. Raises ConfigError if it is not there."""
    kind = wanted
    if wanted == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device", "cuda", "torch sees no CUDA device here; use cpu, or install a CUDA build of torch"
        )
    return _probe_cuda(spec) if kind == "cuda" else _probe_cpu(spec)


def _probe_cuda(spec: ModelSpec) -> DeviceFacts:
    free_bytes, _ = torch.cuda.mem_get_info()
    return DeviceFacts(
        kind="cuda",
        name=torch.cuda.get_device_name(),
        num_threads=max(1, min(4, int(machine.usable_cores()))),
        free_bytes=free_bytes,
        fast_dtypes=("bfloat16", "float16", "float32"),
        attention_backends=_backends(spec, torch.device("cuda")),
    )


def _probe_cpu(spec: ModelSpec) -> DeviceFacts:
    return DeviceFacts(
        kind="cpu",
        name=f"CPU ({platform.machine()})",
        num_threads=max(1, int(machine.usable_cores())),
        free_bytes=machine.memory().usable or 0,
        # Half-precision products on most CPUs run through conversions, tens of times slower than float32.
        fast_dtypes=("float32",),
        attention_backends=_backends(spec, torch.device("cpu")),
    )


def _backends(spec: ModelSpec, device: torch.device) -> dict[str, tuple[str, ...]]:
    layers = attention_layers(spec)
    return {name: able_backends(layers, device, dtype) for name, dtype in DTYPES.items()}
