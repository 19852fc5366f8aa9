"""The policies that can be named."""

from penstock.fleet.router.policies.interface import Policy
from penstock.registry import Registry

POLICIES: Registry[type[Policy]] = Registry(
    "routing policy",
    {
        "round-robin": "penstock.fleet.router.policies.round_robin:RoundRobin",
        "least-loaded": "penstock.fleet.router.policies.least_loaded:LeastLoaded",
        "power-of-two": "penstock.fleet.router.policies.power_of_two:PowerOfTwo",
        "session-affinity": "penstock.fleet.router.policies.session_affinity:SessionAffinity",
        "kv-aware": "penstock.fleet.router.policies.kv_aware:KvAware",
        "adapter-affinity": "penstock.fleet.router.policies.adapter_affinity:AdapterAffinity",
    },
)
