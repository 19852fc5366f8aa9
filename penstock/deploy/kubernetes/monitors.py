"""What Prometheus, Grafana and KEDA are told in a cluster: where to scrape, what to watch, when to scale."""

import json
from typing import Any

from penstock.deploy.kubernetes import objects
from penstock.deploy.kubernetes.objects import SERVER, Manifest, manifest
from penstock.deploy.kubernetes.plan import METRICS_ENTRY, Plan
from penstock.deploy.monitoring.dashboard import dashboard
from penstock.deploy.monitoring.rules import Watched, groups

_COMPONENT = "__meta_kubernetes_pod_label_app_kubernetes_io_component"
# Of the KV blocks of one replica: beyond that, prompts that come in begin to push others out.
_KV_SHARE = 0.75
_QUEUED_REQUESTS = 4  # of one replica


def watched(plan: Plan) -> Watched:
    """What is watched in a cluster, where another namespace may have a deployment of the same name."""
    settings = plan.settings
    name = f"{settings.namespace}/{settings.name}"
    return Watched(name, settings.objective, settings.slow_ttft_seconds, may_sleep=plan.may_sleep)


def pod_monitor(plan: Plan) -> Manifest:
    """Scrapes servers and gateways as the jobs that the rules name, each pod by its own name."""
    settings = plan.settings
    endpoint = {
        "port": "http",
        "path": "/metrics",
        "interval": "15s",
        "authorization": {
            "type": "Bearer",
            "credentials": {"name": settings.metrics_secret_name, "key": METRICS_ENTRY},
        },
        "relabelings": [
            {"sourceLabels": [_COMPONENT], "targetLabel": "job", "replacement": f"{watched(plan).name}-$1"},
            {"sourceLabels": ["__meta_kubernetes_pod_name"], "targetLabel": "instance"},
        ],
    }
    own = objects.selector(plan, SERVER)
    del own["app.kubernetes.io/component"]  # servers and gateways
    spec = {"selector": {"matchLabels": own}, "podMetricsEndpoints": [endpoint]}
    return manifest("monitoring.coreos.com/v1", "PodMonitor", plan, SERVER, spec=spec)


def prometheus_rule(plan: Plan) -> Manifest:
    spec = {"groups": groups(watched(plan))}
    return manifest("monitoring.coreos.com/v1", "PrometheusRule", plan, SERVER, spec=spec)


def dashboard_text(subject: Watched) -> str:
    return json.dumps(dashboard(subject), indent=2, ensure_ascii=False) + "\n"


def dashboard_config_map(plan: Plan) -> Manifest:
    """Found by Grafana's sidecar, which looks for the label."""
    name = f"{plan.settings.name}-dashboard"
    made = manifest("v1", "ConfigMap", plan, SERVER, name=name, data={"penstock.json": dashboard_text(watched(plan))})
    made["metadata"]["labels"]["grafana_dashboard"] = "1"
    return made


def scaled_object(plan: Plan, deployment: str) -> Manifest:
    """Has KEDA scale the deployment whose pods are the servers.

    By what they say of themselves: their queues, their caches, and who waits before them. Each query is a sum over the
    fleet and each threshold one replica's share of it. Down slowly, one server a minute: each drains, and the next may
    turn out to be needed.
    """
    settings = plan.settings
    servers, gateways = watched(plan).server_job, watched(plan).gateway_job
    triggers = [
        _trigger(plan, "queued", f"sum(penstock_total_queued_requests{{{servers}}}) or vector(0)", _QUEUED_REQUESTS),
        _trigger(plan, "cache", f"sum(penstock_kv_cache_utilization{{{servers}}}) or vector(0)", _KV_SHARE),
        _trigger(
            plan, "waiting", f"sum(penstock_gateway_waiting_requests{{{gateways}}}) or vector(0)", _QUEUED_REQUESTS
        ),
    ]
    behavior = {
        "scaleUp": {
            "stabilizationWindowSeconds": 0,
            "policies": [{"type": "Percent", "value": 100, "periodSeconds": 30}],
        },
        "scaleDown": {
            "stabilizationWindowSeconds": 300,
            "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
        },
    }
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": deployment},
        "minReplicaCount": settings.replicas,
        "maxReplicaCount": settings.max_replicas,
        "pollingInterval": 10,
        "cooldownPeriod": 300,
        # No fallback: where Prometheus cannot be asked, the autoscaler leaves what runs as it is.
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
        "triggers": triggers,
    }
    return manifest("keda.sh/v1alpha1", "ScaledObject", plan, SERVER, spec=spec)


def _trigger(plan: Plan, name: str, query: str, threshold: float) -> dict[str, Any]:
    return {
        "type": "prometheus",
        "name": name,
        "metricType": "AverageValue",
        "metadata": {
            "serverAddress": plan.settings.prometheus_url,
            "query": query,
            "threshold": f"{threshold:g}",
            "activationThreshold": "0",
        },
    }
