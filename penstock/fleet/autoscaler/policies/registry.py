"""The scale policies that can be named."""

from penstock.fleet.autoscaler.policies.interface import ScalePolicy
from penstock.registry import Registry

SCALE_POLICIES: Registry[type[ScalePolicy]] = Registry(
    "scale policy",
    {
        "promises": "penstock.fleet.autoscaler.policies.promises:Promises",
        "queue-length": "penstock.fleet.autoscaler.policies.queue_length:QueueLength",
    },
)
