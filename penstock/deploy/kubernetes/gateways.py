"""The gateways: their files, pods, address, and the one right they need in the cluster."""

from penstock.deploy.kubernetes import objects
from penstock.deploy.kubernetes.objects import GATEWAY, Manifest, gateway_name, manifest
from penstock.deploy.kubernetes.plan import GATEWAY_FILES, GATEWAY_PORT, METRICS_FILES, Plan
from penstock.deploy.kubernetes.servers import checksum


def config_map(plan: Plan) -> Manifest:
    return manifest("v1", "ConfigMap", plan, GATEWAY, data=dict(plan.gateway_files))


def service_account(plan: Plan) -> Manifest:
    return manifest("v1", "ServiceAccount", plan, GATEWAY, automountServiceAccountToken=True)


def role(plan: Plan) -> Manifest:
    """To find servers and, only where the gateway is to scale them, to say how many there are."""
    rules: list[Manifest] = [{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list"]}]
    if plan.settings.gateway_scales:
        scale = {"apiGroups": ["apps"], "resources": ["deployments/scale"], "resourceNames": [plan.settings.name]}
        rules.append({**scale, "verbs": ["get", "patch"]})
    return manifest("rbac.authorization.k8s.io/v1", "Role", plan, GATEWAY, rules=rules)


def role_binding(plan: Plan) -> Manifest:
    name, namespace = gateway_name(plan), plan.settings.namespace
    return manifest(
        "rbac.authorization.k8s.io/v1",
        "RoleBinding",
        plan,
        GATEWAY,
        roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        subjects=[{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
    )


def deployment(plan: Plan) -> Manifest:
    folder = GATEWAY_FILES
    container = {
        "name": "gateway",
        "image": plan.settings.image,
        "args": ["gateway", "--config", f"{folder}/gateway.toml", "--fleet", f"{folder}/fleet.toml"],
        "ports": [{"name": "http", "containerPort": GATEWAY_PORT}],
        "env": [
            {"name": "HOME", "value": "/tmp"},
            *(item for item in objects.secret_environment(plan) if item["name"] == "PENSTOCK_STORE"),
        ],
        "resources": {"requests": {"cpu": "1", "memory": "512Mi"}, "limits": {"memory": "1Gi"}},
        **objects.gateway_probes(),
        "lifecycle": objects.drain_hook(),
        "securityContext": objects.container_security(),
        "volumeMounts": [
            *objects.mounts(("config", folder, True), ("metrics", METRICS_FILES, True)),
            *objects.keys_mount(plan),
            *objects.mounts(("temporary", "/tmp", False)),
        ],
    }
    template = objects.pod_template(
        plan,
        GATEWAY,
        checksum=checksum(plan.gateway_files),
        spec={
            "serviceAccountName": gateway_name(plan),
            "automountServiceAccountToken": True,
            "containers": [container],
            "volumes": [
                objects.config_volume("config", gateway_name(plan)),
                objects.metrics_volume(plan),
                *objects.keys_volume(plan),
                objects.temporary_volume(),
            ],
        },
    )
    spec = {
        "replicas": plan.settings.gateways,
        "selector": {"matchLabels": objects.selector(plan, GATEWAY)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": template,
    }
    return manifest("apps/v1", "Deployment", plan, GATEWAY, spec=spec)


def service(plan: Plan) -> Manifest:
    spec = {
        "selector": objects.selector(plan, GATEWAY),
        "ports": [{"name": "http", "port": 80, "targetPort": "http", "appProtocol": "http"}],
    }
    return manifest("v1", "Service", plan, GATEWAY, spec=spec)
