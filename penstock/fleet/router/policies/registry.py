"""The policies that can be named. Imports none of them, so that `--help` may name them."""

from typing import TYPE_CHECKING

from penstock.registry import Registry

if TYPE_CHECKING:
    from penstock.fleet.router.policies.interface import Policy

POLICIES: "Registry[type[Policy]]" = Registry(
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
