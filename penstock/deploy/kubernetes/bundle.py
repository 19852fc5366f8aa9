"""The folder that `penstock deploy kubernetes` writes: which file holds what, and what each folder needs.

Apply a folder where the cluster has what it needs; `kserve` and `ray` are other ways to run what `core` runs.
"""

from collections.abc import Mapping
from pathlib import Path

from penstock.deploy.compose import compose_files
from penstock.deploy.document import yaml_text
from penstock.deploy.kubernetes import gateways, kserve, monitors, ray_service, routes, servers
from penstock.deploy.kubernetes.objects import GATEWAY, Manifest
from penstock.deploy.kubernetes.plan import Plan
from penstock.errors import ConfigError

# Folder: what it is for, as the command prints it.
FOLDERS: Mapping[str, str] = {
    "core": "servers and gateways; any cluster",
    "keda": "scaling by queues and caches; needs KEDA",
    "prometheus": "scraping and alerts; needs the Prometheus operator",
    "grafana": "the dashboard, as a ConfigMap for Grafana's sidecar and as JSON",
    "gateway-api": "a route to the gateways; needs Gateway API",
    "inference-pool": "a route to the servers themselves; needs the inference extension and an endpoint picker",
    "kserve": "instead of core's servers; needs KServe",
    "ray": "instead of core's servers; needs KubeRay and an image with penstock[ray]",
    "compose": "one machine; needs docker compose",
}


def manifests(plan: Plan) -> dict[str, Manifest]:
    """Return every manifest by its path in the folder."""
    scaling = {} if plan.settings.gateway_scales else {"keda/scaledobject.yaml": monitors.scaled_object(plan)}
    return {
        "core/00-namespace.yaml": servers.namespace(plan),
        "core/server-serviceaccount.yaml": servers.service_account(plan),
        "core/server-configmap.yaml": servers.config_map(plan),
        "core/server-deployment.yaml": servers.deployment(plan),
        "core/server-service.yaml": servers.service(plan),
        "core/server-poddisruptionbudget.yaml": servers.disruption_budget(plan),
        "core/gateway-serviceaccount.yaml": gateways.service_account(plan),
        "core/gateway-role.yaml": gateways.role(plan),
        "core/gateway-rolebinding.yaml": gateways.role_binding(plan),
        "core/gateway-configmap.yaml": gateways.config_map(plan),
        "core/gateway-deployment.yaml": gateways.deployment(plan),
        "core/gateway-service.yaml": gateways.service(plan),
        "core/gateway-poddisruptionbudget.yaml": servers.disruption_budget(plan, GATEWAY),
        **scaling,
        "prometheus/podmonitor.yaml": monitors.pod_monitor(plan),
        "prometheus/prometheusrule.yaml": monitors.prometheus_rule(plan),
        "grafana/configmap.yaml": monitors.dashboard_config_map(plan),
        "gateway-api/httproute.yaml": routes.http_route(plan),
        "inference-pool/inferencepool.yaml": routes.inference_pool(plan),
        "inference-pool/httproute.yaml": routes.pool_route(plan),
        "kserve/configmap.yaml": servers.config_map(plan),
        "kserve/servingruntime.yaml": kserve.serving_runtime(plan),
        "kserve/inferenceservice.yaml": kserve.inference_service(plan),
        "ray/configmap.yaml": servers.config_map(plan),
        "ray/rayservice.yaml": ray_service.ray_service(plan),
    }


def bundle(plan: Plan) -> dict[str, str]:
    """Return every file by its path in the folder."""
    return {
        **{path: yaml_text(made) for path, made in manifests(plan).items()},
        "grafana/penstock.json": monitors.dashboard_text(monitors.watched(plan)),
        **{f"compose/{path}": text for path, text in compose_files(plan).items()},
    }


def write(files: Mapping[str, str], folder: Path) -> None:
    """Write the files, over those of an earlier run; what else is in the folder stays. Raises ConfigError."""
    try:
        for path, text in files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("--out", str(folder), f"it cannot be written ({error.strerror})") from error
