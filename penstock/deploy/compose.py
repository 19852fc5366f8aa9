"""The same fleet on one machine: docker compose with servers, a gateway, Prometheus and Grafana.

Everything listens on loopback of that machine; keys come from files beside the compose file, which the operator makes.
Knows nothing of Kubernetes but the plan.
"""

from typing import Any

import msgspec

from penstock.deploy.document import yaml_text
from penstock.deploy.kubernetes import plan as names
from penstock.deploy.kubernetes.monitors import dashboard_text
from penstock.deploy.kubernetes.objects import USER, grace_seconds
from penstock.deploy.kubernetes.plan import Plan, fleet_text, with_servers
from penstock.deploy.monitoring.rules import Watched, groups
from penstock.fleet.config import DnsSection, FleetConfig

_HEAD = """\
# compose: one machine; needs docker compose. Before `docker compose up`, make the folder `secrets` here with what
# `secrets:` names below: chmod 700 secrets, chmod 444 secrets/*. The containers run as users 10001, 65534 and 472, all
# of whom must read their files, which docker mounts one by one; nobody else enters the folder.
"""
_MORE_SERVERS = "more-servers"  # the profile of the servers beside the first
PROMETHEUS_IMAGE = "prom/prometheus:v3.5.0"
GRAFANA_IMAGE = "grafana/grafana:12.1.0"


def compose_files(plan: Plan) -> dict[str, str]:
    """Return the folder: path in it, text."""
    settings = plan.settings
    watched = Watched(settings.name, settings.objective, settings.slow_ttft_seconds)
    return {
        "compose.yaml": _HEAD + yaml_text(_compose(plan)),
        **{f"server/{name}": text for name, text in plan.server_files.items()},
        "gateway/gateway.toml": plan.gateway_files["gateway.toml"],
        "gateway/fleet.toml": fleet_text(_fleet(plan)),
        "prometheus/prometheus.yml": yaml_text(_prometheus(plan)),
        "prometheus/rules.yml": yaml_text({"groups": groups(watched)}),
        "grafana/datasource.yml": yaml_text(_data_source()),
        "grafana/dashboards.yml": yaml_text(_dashboards()),
        "grafana/penstock.json": dashboard_text(watched),
    }


def _fleet(plan: Plan) -> FleetConfig:
    """The operator's, less what only a cluster has: its API, and something that scales."""
    discovery = msgspec.structs.replace(plan.fleet.discovery, kubernetes=())
    fleet = msgspec.structs.replace(plan.fleet, discovery=discovery, autoscaler={})
    servers = DnsSection(name="server", port=names.SERVER_PORT, key_file=names.METRICS_KEY_FILE)
    return with_servers(fleet, dns=(servers,))


def _compose(plan: Plan) -> dict[str, Any]:
    secrets: dict[str, Any] = {"metrics_key": {"file": "./secrets/metrics.key"}}
    if plan.settings.keys_secret_name is not None:
        secrets["keys"] = {"file": "./secrets/keys.toml"}
    secrets["grafana_password"] = {"file": "./secrets/grafana.password"}
    return {
        "name": plan.settings.name,
        "services": {
            **_servers(plan),
            "gateway": _gateway(plan),
            "prometheus": _prometheus_service(),
            "grafana": _grafana(),
        },
        "volumes": {"cache": {}, "prometheus": {}, "grafana": {}},
        "secrets": secrets,
    }


def _confined(plan: Plan) -> dict[str, Any]:
    return {
        "image": plan.settings.image,
        "user": f"{USER}:{USER}",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "tmpfs": ["/tmp:mode=1777"],
        "restart": "unless-stopped",
        "stop_grace_period": f"{grace_seconds(plan)}s",
    }


def _store(plan: Plan) -> dict[str, str]:
    """The store's URL is taken from the operator's shell."""
    return {"PENSTOCK_STORE": "${PENSTOCK_STORE:?give the store}"} if plan.settings.store_secret else {}


def _keys(plan: Plan) -> list[dict[str, str]]:
    if plan.settings.keys_secret_name is None:
        return []
    return [{"source": "keys", "target": f"{names.KEYS_FILES}/{names.KEYS_ENTRY}"}]


def _healthy(port: int, path: str, start: str) -> dict[str, Any]:
    """The image has Python, and need have nothing else to ask with."""
    ask = f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}{path}', timeout=3)"
    test = ["CMD", "python", "-c", ask]
    return {"test": test, "interval": "10s", "timeout": "5s", "retries": 3, "start_period": start}


def _servers(plan: Plan) -> dict[str, Any]:
    """One that can be scaled or, on GPUs, a service for each with GPUs of its own: a number would be the first ones.

    All are found by the name of the first.
    """
    if not plan.gpus:
        return {"server": _server(plan)}
    services = {"server": _with_gpus(_server(plan), 0, plan.gpus)}
    for place in range(1, plan.settings.replicas):
        service = {"profiles": [_MORE_SERVERS], **_with_gpus(_server(plan), place, plan.gpus)}
        services[f"server-{place + 1}"] = {**service, "networks": {"default": {"aliases": ["server"]}}}
    return services


def _with_gpus(service: dict[str, Any], place: int, gpus: int) -> dict[str, Any]:
    numbers = [str(number) for number in range(place * gpus, (place + 1) * gpus)]
    device = {"driver": "nvidia", "device_ids": numbers, "capabilities": ["gpu"]}
    return {**service, "deploy": {"resources": {"reservations": {"devices": [device]}}}}


def _server(plan: Plan) -> dict[str, Any]:
    settings = plan.settings
    token = {"HF_TOKEN": "${HF_TOKEN:?give the hub's token}"} if settings.hub_secret else {}
    return {
        **_confined(plan),
        "command": ["serve", "--config", f"{names.SERVER_FILES}/serve.toml"],
        "environment": {"HOME": names.CACHE_FOLDER, **_store(plan), **token},
        "secrets": _keys(plan),
        "volumes": [f"./server:{names.SERVER_FILES}:ro", f"cache:{names.CACHE_FOLDER}"],
        "healthcheck": _healthy(names.SERVER_PORT, "/ready", f"{settings.startup_seconds}s"),
    }


def _gateway(plan: Plan) -> dict[str, Any]:
    folder = names.GATEWAY_FILES
    return {
        **_confined(plan),
        "command": ["gateway", "--config", f"{folder}/gateway.toml", "--fleet", f"{folder}/fleet.toml"],
        "environment": {"HOME": "/tmp", **_store(plan)},
        "secrets": [*_keys(plan), {"source": "metrics_key", "target": names.METRICS_KEY_FILE}],
        "volumes": [f"./gateway:{folder}:ro"],
        "ports": [f"127.0.0.1:{names.GATEWAY_PORT}:{names.GATEWAY_PORT}"],
        "healthcheck": _healthy(names.GATEWAY_PORT, "/live", "30s"),
    }


def _prometheus_service() -> dict[str, Any]:
    return {
        "image": PROMETHEUS_IMAGE,
        "command": ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"],
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "secrets": [{"source": "metrics_key"}],
        "volumes": ["./prometheus:/etc/prometheus:ro", "prometheus:/prometheus"],
        "ports": ["127.0.0.1:9090:9090"],
        "restart": "unless-stopped",
    }


def _grafana() -> dict[str, Any]:
    folder = "/etc/grafana/provisioning"
    return {
        "image": GRAFANA_IMAGE,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "environment": {
            "GF_SECURITY_ADMIN_PASSWORD__FILE": "/run/secrets/grafana_password",
            "GF_ANALYTICS_REPORTING_ENABLED": "false",
        },
        "secrets": [{"source": "grafana_password"}],
        "volumes": [
            f"./grafana/datasource.yml:{folder}/datasources/penstock.yml:ro",
            f"./grafana/dashboards.yml:{folder}/dashboards/penstock.yml:ro",
            "./grafana/penstock.json:/var/lib/grafana/dashboards/penstock.json:ro",
            "grafana:/var/lib/grafana",
        ],
        "ports": ["127.0.0.1:3000:3000"],
        "restart": "unless-stopped",
    }


def _prometheus(plan: Plan) -> dict[str, Any]:
    ports = {"server": names.SERVER_PORT, "gateway": names.GATEWAY_PORT}
    return {
        "global": {"scrape_interval": "15s", "evaluation_interval": "30s"},
        "rule_files": ["/etc/prometheus/rules.yml"],
        "scrape_configs": [
            {
                "job_name": f"{plan.settings.name}-{service}",
                "authorization": {"type": "Bearer", "credentials_file": "/run/secrets/metrics_key"},
                "dns_sd_configs": [{"names": [service], "type": "A", "port": port, "refresh_interval": "10s"}],
            }
            for service, port in ports.items()
        ],
    }


def _data_source() -> dict[str, Any]:
    source = {"name": "Prometheus", "type": "prometheus", "access": "proxy", "url": "http://prometheus:9090"}
    return {"apiVersion": 1, "datasources": [{**source, "isDefault": True, "editable": False}]}


def _dashboards() -> dict[str, Any]:
    provider = {"name": "penstock", "type": "file", "options": {"path": "/var/lib/grafana/dashboards"}}
    return {"apiVersion": 1, "providers": [{**provider, "disableDeletion": True}]}
