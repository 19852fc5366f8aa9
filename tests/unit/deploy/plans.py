"""Deployments for tests: as little as can be said, and everything."""

from functools import cache
from pathlib import Path
from typing import Any

from penstock.config import gather
from penstock.deploy.kubernetes.bundle import bundle
from penstock.deploy.kubernetes.plan import Plan, make_plan

EVERYTHING = """
model = "Qwen/Qwen3-8B"
served_name = "qwen"
kv_memory = "20GiB"
prefix_cache = false
target_ttft_ms = 800
drain_seconds = 90.5
host = "10.0.0.1"

[deploy]
name = "qwen"
namespace = "models"
image = "registry.example.com/team/penstock@sha256:0123012301230123012301230123012301230123012301230123012301230123"
image_pull_secret = "registry"
replicas = 0
max_replicas = 3
gateways = 3
gpus = 1
gpu_resource = "amd.com/gpu"
cpu = "7500m"
memory = "64Gi"
cache_claim = "models"
startup_seconds = 1801
keys_secret = "our-keys"
store_secret = "our-store"
metrics_secret = "our-metrics"
hub_secret = "hub"
hostname = "llm.example.com"
parent_gateway = "edge"
prometheus_url = "https://prometheus.example.com"
objective = 0.999
slow_ttft_seconds = 1.0
"""


def smallest(**flags: Any) -> Plan:
    return make_plan(gather({}, environ={}), None, flags)


@cache
def smallest_bundle() -> dict[str, str]:
    return bundle(smallest())


def everything(folder: Path) -> Plan:
    """A plan in which every setting, and a file of each kind, is given."""
    template = folder / "chat.jinja"
    template.write_text("{% for message in messages %}\n{{ message.content }}\n{% endfor %}\n")
    prefixes = folder / "prefixes.toml"
    prefixes.write_text('[[prefixes]]\ntext = "Hello."\n')
    config = folder / "penstock.toml"
    config.write_text(f'chat_template = "{template}"\nshared_prefixes = "{prefixes}"\n{EVERYTHING}')
    fleet = folder / "fleet.toml"
    fleet.write_text('policy = "session-affinity"\n[aliases]\n"gpt-4o" = "qwen"\n[queue]\nhold_seconds = 120.0\n')
    return make_plan(gather({}, environ={}, file=config), fleet, {})
