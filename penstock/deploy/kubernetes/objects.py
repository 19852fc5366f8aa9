"""What all manifests share: names, labels, and pods that may do nothing they need not.

Knows nothing of files or of what is scaled, watched or routed.
"""

from collections.abc import Mapping
from typing import Any

import penstock
from penstock.deploy.kubernetes import plan as names
from penstock.deploy.kubernetes.plan import Plan

Manifest = dict[str, Any]

SERVER, GATEWAY = "server", "gateway"
USER = 10001
# Long enough for every proxy and gateway to hear that the pod is leaving, before it stops listening.
PRE_STOP_SECONDS = 5
# Behind the drain: what the server itself takes to send last words and end its engine, twice over.
_STOP_SECONDS = 15
_PROBE_SECONDS = 5


def gateway_name(plan: Plan) -> str:
    return f"{plan.settings.name}-gateway"


def selector(plan: Plan, component: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "penstock",
        "app.kubernetes.io/instance": plan.settings.name,
        "app.kubernetes.io/component": component,
    }


def labels(plan: Plan, component: str) -> dict[str, str]:
    return {**selector(plan, component), "app.kubernetes.io/version": penstock.__version__}


def manifest(api: str, kind: str, plan: Plan, component: str, *, name: str | None = None, **content: Any) -> Manifest:
    """Return an object of the deployment's namespace. `content` is what stands beside its metadata."""
    if name is None:
        name = gateway_name(plan) if component == GATEWAY else plan.settings.name
    metadata = {"name": name, "namespace": plan.settings.namespace, "labels": labels(plan, component)}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}


def grace_seconds(plan: Plan) -> int:
    """How long a pod may take to leave: it hears of it, drains, and ends."""
    return PRE_STOP_SECONDS + plan.drain_seconds + _STOP_SECONDS


def probe(path: str, **limits: int) -> Manifest:
    return {"httpGet": {"path": path, "port": "http"}, "timeoutSeconds": 3, **limits}


def server_probes(plan: Plan) -> Manifest:
    """Ready once the model is loaded; restarted only when it does not answer at all."""
    attempts = -(-plan.settings.startup_seconds // _PROBE_SECONDS)
    return {
        "startupProbe": probe("/ready", periodSeconds=_PROBE_SECONDS, failureThreshold=attempts),
        "livenessProbe": probe("/live", periodSeconds=10, failureThreshold=3),
        "readinessProbe": probe("/ready", periodSeconds=_PROBE_SECONDS, failureThreshold=2),
    }


def gateway_probes() -> Manifest:
    """Ready while it runs: without any replica it holds requests or refuses them in the API's words, and it must be
    reached to wake a fleet that was scaled to zero."""
    return {
        "startupProbe": probe("/live", periodSeconds=1, failureThreshold=60),
        "livenessProbe": probe("/live", periodSeconds=10, failureThreshold=3),
        "readinessProbe": probe("/live", periodSeconds=_PROBE_SECONDS, failureThreshold=2),
    }


def drain_hook() -> Manifest:
    """A command, because the definitions of KServe and KubeRay do not know Kubernetes' own `sleep` yet."""
    return {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_SECONDS)]}}}


def container_security() -> Manifest:
    return {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
    }


def pod_security() -> Manifest:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def server_resources(plan: Plan) -> Manifest:
    """Memory is bounded; CPU is not, because a throttled host starves the GPU."""
    gpus = {plan.settings.gpu_resource: str(plan.gpus)} if plan.gpus else {}
    return {
        "requests": {"cpu": plan.settings.cpu, "memory": plan.settings.memory, **gpus},
        "limits": {"memory": plan.settings.memory, **gpus},
    }


def secret_environment(plan: Plan) -> list[Manifest]:
    """The store's URL and the hub's token, which are never in a manifest."""
    settings = plan.settings
    entries = [("PENSTOCK_STORE", settings.store_secret, names.STORE_ENTRY)]
    entries += [("HF_TOKEN", settings.hub_secret, names.HUB_ENTRY)]
    return [
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
        for variable, secret, key in entries
        if secret
    ]


def server_environment(plan: Plan) -> list[Manifest]:
    return [{"name": "HOME", "value": names.CACHE_FOLDER}, *secret_environment(plan)]


def mounts(*items: tuple[str, str, bool]) -> list[Manifest]:
    """Return mounts of (volume, folder, is read-only)."""
    return [
        {"name": volume, "mountPath": folder, **({"readOnly": True} if read_only else {})}
        for volume, folder, read_only in items
    ]


def temporary_volume() -> Manifest:
    return {"name": "temporary", "emptyDir": {"sizeLimit": "1Gi"}}


def keys_volume(plan: Plan) -> list[Manifest]:
    secret = plan.settings.keys_secret_name
    return [] if secret is None else [_secret_volume("keys", secret, names.KEYS_ENTRY)]


def keys_mount(plan: Plan) -> list[Manifest]:
    return [] if plan.settings.keys_secret_name is None else mounts(("keys", names.KEYS_FILES, True))


def metrics_volume(plan: Plan) -> Manifest:
    return _secret_volume("metrics", plan.settings.metrics_secret_name, names.METRICS_ENTRY)


def _secret_volume(name: str, secret: str, entry: str) -> Manifest:
    # 0440: the group of the volume, which is the pod's, may read it; nobody else.
    items = [{"key": entry, "path": entry}]
    return {"name": name, "secret": {"secretName": secret, "defaultMode": 0o440, "items": items}}


def config_volume(name: str, config_map: str) -> Manifest:
    return {"name": name, "configMap": {"name": config_map}}


def server_volumes(plan: Plan) -> list[Manifest]:
    settings = plan.settings
    cache: Manifest = {"emptyDir": {"sizeLimit": settings.cache_size}}
    if settings.cache_claim:
        cache = {"persistentVolumeClaim": {"claimName": settings.cache_claim}}
    return [
        config_volume("config", settings.name),
        *keys_volume(plan),
        {"name": "cache", **cache},
        temporary_volume(),
    ]


def server_mounts(plan: Plan) -> list[Manifest]:
    return [
        *mounts(("config", names.SERVER_FILES, True)),
        *keys_mount(plan),
        *mounts(("cache", names.CACHE_FOLDER, False), ("temporary", "/tmp", False)),
    ]


def gpu_tolerations(plan: Plan) -> Manifest:
    """GPU nodes are commonly tainted with the resource's name."""
    if not plan.gpus:
        return {}
    return {"tolerations": [{"key": plan.settings.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}]}


def pull_secrets(plan: Plan) -> Manifest:
    secret = plan.settings.image_pull_secret
    return {"imagePullSecrets": [{"name": secret}]} if secret else {}


def spread(plan: Plan, component: str) -> list[Manifest]:
    """Over nodes where that can be had, so that one lost node is not all of them."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": selector(plan, component)},
        }
    ]


def pod_template(plan: Plan, component: str, *, checksum: str, spec: Mapping[str, Any]) -> Manifest:
    """Return a pod that is replaced when its files change, and that gets no variables it did not ask for.

    A cluster gives pods a variable for each service, and PENSTOCK_PORT, of a service `penstock`, is an option of ours.
    """
    return {
        "metadata": {"labels": labels(plan, component), "annotations": {"penstock/config-sha256": checksum}},
        "spec": {
            "enableServiceLinks": False,
            "securityContext": pod_security(),
            "terminationGracePeriodSeconds": grace_seconds(plan),
            **pull_secrets(plan),
            "topologySpreadConstraints": spread(plan, component),
            **spec,
        },
    }
