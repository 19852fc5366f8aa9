"""The kinds of servers that the gateway can front."""

from penstock.fleet.adapters.interface import ReplicaAdapter
from penstock.registry import Registry

ADAPTERS: Registry[ReplicaAdapter] = Registry(
    "kind of replica",
    {
        "penstock": "penstock.fleet.adapters.penstock:ADAPTER",
        "vllm": "penstock.fleet.adapters.vllm:ADAPTER",
        "sglang": "penstock.fleet.adapters.sglang:ADAPTER",
        "llama.cpp": "penstock.fleet.adapters.llama_cpp:ADAPTER",
        "tgi": "penstock.fleet.adapters.tgi:ADAPTER",
    },
)
