"""The way in: Gateway API's routes, to our gateways or to an inference pool of our servers."""

from typing import Any

from penstock.deploy.kubernetes import objects
from penstock.deploy.kubernetes.objects import GATEWAY, SERVER, Manifest, gateway_name, manifest
from penstock.deploy.kubernetes.plan import SERVER_PORT, Plan

_PICKER_PORT = 9002


def http_route(plan: Plan) -> Manifest:
    """The API, and nothing else, to our gateways."""
    return _route(plan, gateway_name(plan), GATEWAY, {"name": gateway_name(plan), "port": 80})


def pool_route(plan: Plan) -> Manifest:
    """The API to the inference pool, for those whose Gateway has an endpoint picker of its own."""
    backend = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": plan.settings.name}
    return _route(plan, f"{plan.settings.name}-pool", SERVER, backend)


def inference_pool(plan: Plan) -> Manifest:
    spec = {
        "selector": {"matchLabels": objects.selector(plan, SERVER)},
        "targetPorts": [{"number": SERVER_PORT}],
        "endpointPickerRef": {
            "name": f"{plan.settings.name}-endpoint-picker",
            "port": {"number": _PICKER_PORT},
            # A picker that is away must not take the model with it.
            "failureMode": "FailOpen",
        },
    }
    return manifest("inference.networking.k8s.io/v1", "InferencePool", plan, SERVER, spec=spec)


def _route(plan: Plan, name: str, component: str, backend: dict[str, Any]) -> Manifest:
    rule = {
        "matches": [{"path": {"type": "PathPrefix", "value": "/v1"}}],
        "backendRefs": [backend],
        # Streams last as long as their answers do; servers and gateways bound what is silent.
        "timeouts": {"request": "0s"},
    }
    hostnames = {"hostnames": [plan.settings.hostname]} if plan.settings.hostname else {}
    spec = {"parentRefs": [{"name": plan.settings.parent_gateway}], **hostnames, "rules": [rule]}
    return manifest("gateway.networking.k8s.io/v1", "HTTPRoute", plan, component, name=name, spec=spec)
