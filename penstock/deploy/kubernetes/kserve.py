"""The same servers under KServe: a runtime that runs Penstock, and a service that uses it."""

from penstock.deploy.kubernetes import objects
from penstock.deploy.kubernetes.objects import SERVER, Manifest, manifest
from penstock.deploy.kubernetes.plan import SERVER_FILES, SERVER_PORT, Plan

_FORMATS = ("huggingface", "safetensors", "gguf")


def deployment_name(plan: Plan) -> str:
    """The Deployment that KServe makes of the service's predictor."""
    return f"{plan.settings.name}-predictor"


def serving_runtime(plan: Plan) -> Manifest:
    container = {
        "name": "kserve-container",  # KServe knows the one that serves by this name
        "image": plan.settings.image,
        "args": ["serve", "--config", f"{SERVER_FILES}/serve.toml"],
        "ports": [{"name": "http", "containerPort": SERVER_PORT, "protocol": "TCP"}],
        "env": objects.server_environment(plan),
        "resources": objects.server_resources(plan),
        **objects.server_probes(plan),
        "lifecycle": objects.drain_hook(),
        "securityContext": objects.container_security(),
        "volumeMounts": objects.server_mounts(plan),
    }
    spec = {
        "supportedModelFormats": [{"name": name, "version": "1", "autoSelect": False} for name in _FORMATS],
        "multiModel": False,
        "containers": [container],
        **objects.pull_secrets(plan),
        **objects.gpu_tolerations(plan),
        "volumes": objects.server_volumes(plan),
    }
    return manifest("serving.kserve.io/v1alpha1", "ServingRuntime", plan, SERVER, spec=spec)


def inference_service(plan: Plan) -> Manifest:
    """Plain deployments, and no CPU autoscaler: a busy GPU is not a busy CPU."""
    settings = plan.settings
    spec = {
        "predictor": {
            "minReplicas": max(settings.replicas, 1),
            "maxReplicas": settings.max_replicas,
            # Of the pods: by these core's Service, the budget and Prometheus know them.
            "labels": objects.labels(plan, SERVER),
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": objects.grace_seconds(plan),
            "securityContext": objects.pod_security(),
            # The server fetches its model by its own options, into the cache.
            "model": {"modelFormat": {"name": _FORMATS[0]}, "runtime": settings.name},
        }
    }
    made = manifest("serving.kserve.io/v1beta1", "InferenceService", plan, SERVER, spec=spec)
    made["metadata"]["annotations"] = {
        "serving.kserve.io/deploymentMode": "RawDeployment",
        "serving.kserve.io/autoscalerClass": "external",
    }
    return made
