"""The backends that can be named."""

from penstock.fleet.autoscaler.backends.interface import ScaleBackend
from penstock.registry import Registry

BACKENDS: Registry[type[ScaleBackend]] = Registry(
    "scale backend",
    {
        "local": "penstock.fleet.autoscaler.backends.local:LocalProcesses",
        "kubernetes": "penstock.fleet.autoscaler.backends.kubernetes:KubernetesScale",
        "ray": "penstock.fleet.autoscaler.backends.ray:RayScale",
        "external": "penstock.fleet.autoscaler.backends.external:ExternalScale",
    },
)
