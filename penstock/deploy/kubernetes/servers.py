"""The servers: their files, pods, address, and how many may be away at once."""

import hashlib
from collections.abc import Mapping

from penstock.deploy.kubernetes import objects
from penstock.deploy.kubernetes.objects import SERVER, Manifest, manifest
from penstock.deploy.kubernetes.plan import SERVER_FILES, SERVER_PORT, Plan


def namespace(plan: Plan) -> Manifest:
    """A namespace that takes no pod with rights it need not have."""
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": plan.settings.namespace, "labels": label}}


def config_map(plan: Plan) -> Manifest:
    return manifest("v1", "ConfigMap", plan, SERVER, data=dict(plan.server_files))


def service_account(plan: Plan) -> Manifest:
    return manifest("v1", "ServiceAccount", plan, SERVER, automountServiceAccountToken=False)


def checksum(files: Mapping[str, str]) -> str:
    return hashlib.sha256("\0".join(f"{name}\0{text}" for name, text in files.items()).encode()).hexdigest()


def deployment(plan: Plan) -> Manifest:
    settings = plan.settings
    container = {
        "name": "server",
        "image": settings.image,
        "args": ["serve", "--config", f"{SERVER_FILES}/serve.toml"],
        "ports": [{"name": "http", "containerPort": SERVER_PORT}],
        "env": objects.server_environment(plan),
        "resources": objects.server_resources(plan),
        **objects.server_probes(plan),
        "lifecycle": objects.drain_hook(),
        "securityContext": objects.container_security(),
        "volumeMounts": objects.server_mounts(plan),
    }
    template = objects.pod_template(
        plan,
        SERVER,
        checksum=checksum(plan.server_files),
        spec={
            "serviceAccountName": settings.name,
            "automountServiceAccountToken": False,
            **objects.gpu_tolerations(plan),
            "containers": [container],
            "volumes": objects.server_volumes(plan),
        },
    )
    spec = {
        "replicas": settings.replicas,
        "selector": {"matchLabels": objects.selector(plan, SERVER)},
        # A server that leaves has been replaced before.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        # A server is not ready for minutes: that is not a failed roll-out.
        "progressDeadlineSeconds": settings.startup_seconds + 60,
        "template": template,
    }
    return manifest("apps/v1", "Deployment", plan, SERVER, spec=spec)


def service(plan: Plan) -> Manifest:
    """Headless: the gateway chooses a server, no proxy of the cluster does."""
    spec = {
        "clusterIP": "None",
        "selector": objects.selector(plan, SERVER),
        "ports": [{"name": "http", "port": SERVER_PORT, "targetPort": "http"}],
    }
    return manifest("v1", "Service", plan, SERVER, spec=spec)


def disruption_budget(plan: Plan, component: str = SERVER, *, min_available: int | None = None) -> Manifest:
    """At most one may be away; with `min_available`, at least so many are there.

    Of pods whose owner has no scale that the cluster can read, only the latter can be kept.
    """
    spec = {
        **({"maxUnavailable": 1} if min_available is None else {"minAvailable": min_available}),
        "selector": {"matchLabels": objects.selector(plan, component)},
        # One that is not ready serves nobody: a node may be emptied in spite of it.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return manifest("policy/v1", "PodDisruptionBudget", plan, component, spec=spec)
