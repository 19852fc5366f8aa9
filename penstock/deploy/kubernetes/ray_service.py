"""The same servers on a Ray cluster that KubeRay makes: one head, and workers with what a server needs.

The application is `penstock.deploy.ray_serve`'s. Knows nothing of Ray itself.
"""

from typing import Any

from penstock.deploy.document import yaml_text
from penstock.deploy.kubernetes import objects
from penstock.deploy.kubernetes.objects import SERVER, Manifest, manifest
from penstock.deploy.kubernetes.plan import CACHE_FOLDER, CLUSTER_OPTIONS, METRICS_FILES, METRICS_KEY_FILE, Plan

APPLICATION = "penstock.deploy.ray_serve.application:build"
SERVER_PORT = 8001  # of the one server in each worker's pod; 8000 is Ray Serve's proxy's
_HEAD_RESOURCES = {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "8Gi"}}


def ray_service(plan: Plan) -> Manifest:
    spec = {
        "serveConfigV2": yaml_text(serve_config(plan)),
        "rayClusterConfig": {
            "enableInTreeAutoscaling": True,
            "autoscalerOptions": {
                "resources": {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "1Gi"}},
                "securityContext": objects.container_security(),
            },
            "headGroupSpec": {
                # The head places servers and runs none.
                "rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": "0"},
                "template": _pod(plan, "ray-head", _head(plan), is_head=True),
            },
            "workerGroupSpecs": [
                {
                    "groupName": "servers",
                    "replicas": plan.settings.replicas,
                    "minReplicas": plan.settings.replicas,
                    "maxReplicas": plan.settings.max_replicas,
                    # As much as one server reserves, so that there is one in each.
                    "rayStartParams": {"num-cpus": str(plan.options.tensor_parallel)},
                    "template": _pod(plan, SERVER, _worker(plan), is_head=False),
                }
            ],
        },
    }
    return manifest("ray.io/v1", "RayService", plan, SERVER, spec=spec)


def serve_config(plan: Plan) -> dict[str, Any]:
    """Return Ray Serve's configuration: one application, which nothing reaches through Serve's proxies."""
    settings = plan.settings
    values = {name: getattr(plan.options, name) for name in plan.given if name not in CLUSTER_OPTIONS}
    arguments = {
        "name": settings.name,
        "replicas": max(settings.replicas, 1),
        "max_replicas": settings.max_replicas,
        # Of each rank; together they take a whole worker.
        "cpus": 1.0,
        "gpus": plan.gpus / plan.options.tensor_parallel,
        "port": SERVER_PORT,
        "key_file": METRICS_KEY_FILE,
        "options": {**values, "cache_dir": CACHE_FOLDER, "log_format": "json"},
    }
    application = {"name": settings.name, "import_path": APPLICATION, "route_prefix": None, "args": arguments}
    return {"applications": [application]}


def _head(plan: Plan) -> Manifest:
    return {"name": "ray-head", "resources": _HEAD_RESOURCES, **_container(plan)}


def _worker(plan: Plan) -> Manifest:
    """Ready when its server is, whatever Ray is: only then do gateways find it."""
    return {
        "name": "ray-worker",
        "resources": objects.server_resources(plan),
        "ports": [{"name": "http", "containerPort": SERVER_PORT}],
        "readinessProbe": objects.server_probes(plan)["readinessProbe"],
        **_container(plan),
    }


def _container(plan: Plan) -> Manifest:
    return {
        "image": plan.settings.image,
        "env": objects.server_environment(plan),
        "lifecycle": objects.drain_hook(),
        "securityContext": objects.container_security(),
        "volumeMounts": [*objects.server_mounts(plan), *objects.mounts(("metrics", METRICS_FILES, True))],
    }


def _pod(plan: Plan, component: str, container: Manifest, *, is_head: bool) -> Manifest:
    return {
        "metadata": {"labels": objects.labels(plan, component)},
        "spec": {
            "enableServiceLinks": False,
            "automountServiceAccountToken": is_head,  # the head scales workers
            "securityContext": objects.pod_security(),
            "terminationGracePeriodSeconds": objects.grace_seconds(plan),
            **objects.pull_secrets(plan),
            **({} if is_head else objects.gpu_tolerations(plan)),
            "containers": [container],
            "volumes": [*objects.server_volumes(plan), objects.metrics_volume(plan)],
        },
    }
