"""The folder that `penstock deploy kubernetes` writes: which file holds what, and what each folder needs.

Apply `core` with one of `servers`, `kserve` and `ray`, and what else the cluster has a use for. All three make pods
with the same labels and the same port name, so that everything else finds the servers whichever it is.
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
    "core": "gateways, and how servers are found; with one of servers, kserve and ray",
    "servers": "servers as a Deployment; with core; any cluster",
    "kserve": "servers under KServe; with core, instead of servers; needs KServe",
    "ray": "servers on Ray, which scales them; with core, instead of servers; needs KubeRay, and penstock[ray] inside",
    "keda": "scaling by queues and caches; with core, servers and prometheus; needs KEDA",
    "kserve-keda": "the same with kserve; with core, kserve and prometheus; needs KEDA",
    "prometheus": "scraping and alerts; with any servers; needs the Prometheus operator",
    "grafana": "the dashboard, as a ConfigMap for Grafana's sidecar and as JSON",
    "gateway-api": "a route to the gateways; with any servers; needs Gateway API",
    "inference-pool": "a route to the servers themselves; with servers or kserve; needs the inference extension and an "
    "endpoint picker",
    "compose": "one machine; needs docker compose",
}


def manifests(plan: Plan) -> dict[str, Manifest]:
    """Return every manifest by its path in the folder."""
    return {
        "core/00-namespace.yaml": servers.namespace(plan),
        "core/server-configmap.yaml": servers.config_map(plan),
        "core/server-service.yaml": servers.service(plan),
        "core/gateway-serviceaccount.yaml": gateways.service_account(plan),
        "core/gateway-role.yaml": gateways.role(plan),
        "core/gateway-rolebinding.yaml": gateways.role_binding(plan),
        "core/gateway-configmap.yaml": gateways.config_map(plan),
        "core/gateway-deployment.yaml": gateways.deployment(plan),
        "core/gateway-service.yaml": gateways.service(plan),
        "core/gateway-poddisruptionbudget.yaml": servers.disruption_budget(plan, GATEWAY),
        "servers/serviceaccount.yaml": servers.service_account(plan),
        "servers/deployment.yaml": servers.deployment(plan),
        "servers/poddisruptionbudget.yaml": servers.disruption_budget(plan),
        **_other_ways(plan),
        "prometheus/podmonitor.yaml": monitors.pod_monitor(plan),
        "prometheus/prometheusrule.yaml": monitors.prometheus_rule(plan),
        "grafana/configmap.yaml": monitors.dashboard_config_map(plan),
        "gateway-api/httproute.yaml": routes.http_route(plan),
        "inference-pool/inferencepool.yaml": routes.inference_pool(plan),
        "inference-pool/httproute.yaml": routes.pool_route(plan),
    }


def _other_ways(plan: Plan) -> dict[str, Manifest]:
    """What starts or scales servers in another way; a gateway that scales a Deployment leaves no room for it."""
    if plan.settings.gateway_scales:
        return {}
    return {
        "kserve/servingruntime.yaml": kserve.serving_runtime(plan),
        "kserve/inferenceservice.yaml": kserve.inference_service(plan),
        "kserve/poddisruptionbudget.yaml": servers.disruption_budget(plan),
        "ray/rayservice.yaml": ray_service.ray_service(plan),
        **_ray_budget(plan),
        "keda/scaledobject.yaml": monitors.scaled_object(plan, plan.settings.name),
        "kserve-keda/scaledobject.yaml": monitors.scaled_object(plan, kserve.deployment_name(plan)),
    }


def _ray_budget(plan: Plan) -> dict[str, Manifest]:
    """A lone server may be away like any other: a budget that keeps it would keep its node for ever."""
    if plan.settings.replicas < 2:
        return {}
    budget = servers.disruption_budget(plan, min_available=plan.settings.replicas - 1)
    return {"ray/poddisruptionbudget.yaml": budget}


def bundle(plan: Plan) -> dict[str, str]:
    """Return every file by its path in the folder."""
    return {
        **{path: _headed(path, yaml_text(made)) for path, made in manifests(plan).items()},
        "grafana/penstock.json": monitors.dashboard_text(monitors.watched(plan)),
        **{f"compose/{path}": text for path, text in compose_files(plan).items()},
    }


def _headed(path: str, text: str) -> str:
    """Return a manifest that says what it is applied with."""
    folder = path.partition("/")[0]
    return f"# {folder}: {FOLDERS[folder]}\n{text}"


def write(files: Mapping[str, str], folder: Path) -> None:
    """Write the files, over those of an earlier run; what else is in the folder stays. Raises ConfigError."""
    try:
        for path, text in files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("--out", str(folder), f"it cannot be written ({error.strerror})") from error
