"""The same servers on a Ray cluster that KubeRay makes: one head, and workers with what a server needs.

The application is `penstock.deploy.ray_serve`'s. Knows nothing of Ray itself.
"""

from typing import Any

from penstock.deploy.document import yaml_text
from penstock.deploy.kubernetes import objects
from penstock.deploy.kubernetes.objects import SERVER, Manifest, manifest
from penstock.deploy.kubernetes.plan import CACHE_FOLDER, CLUSTER_OPTIONS, METRICS_FILES, METRICS_KEY_FILE, Plan

APPLICATION = "penstock.deploy.ray_serve.application:build"
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
                "template": _template(plan, "ray-head", _HEAD_RESOURCES, gpus=False),
            },
            "workerGroupSpecs": [
                {
                    "groupName": "servers",
                    "replicas": plan.settings.replicas,
                    "minReplicas": plan.settings.replicas,
                    "maxReplicas": plan.settings.max_replicas,
                    "rayStartParams": {},
                    "template": _template(plan, "ray-worker", objects.server_resources(plan), gpus=True),
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
        # A server takes a whole worker, which has what it needs.
        "cpus": 1.0,
        "gpus": float(plan.gpus > 0),
        "key_file": METRICS_KEY_FILE,
        "options": {**values, "cache_dir": CACHE_FOLDER, "log_format": "json"},
    }
    application = {"name": settings.name, "import_path": APPLICATION, "route_prefix": None, "args": arguments}
    return {"applications": [application]}


def _template(plan: Plan, container: str, resources: Manifest, *, gpus: bool) -> Manifest:
    return {
        "metadata": {"labels": objects.labels(plan, container)},
        "spec": {
            "enableServiceLinks": False,
            "automountServiceAccountToken": gpus is False,  # the head scales workers
            "securityContext": objects.pod_security(),
            "terminationGracePeriodSeconds": objects.grace_seconds(plan),
            **objects.pull_secrets(plan),
            **(objects.gpu_tolerations(plan) if gpus else {}),
            "containers": [
                {
                    "name": container,
                    "image": plan.settings.image,
                    "env": objects.server_environment(plan),
                    "resources": resources,
                    "lifecycle": objects.drain_hook(),
                    "securityContext": objects.container_security(),
                    "volumeMounts": [
                        *objects.server_mounts(plan),
                        *objects.mounts(("metrics", METRICS_FILES, True)),
                    ],
                }
            ],
            "volumes": [*objects.server_volumes(plan), objects.metrics_volume(plan)],
        },
    }
