"""Each way to run servers is whole: whatever a manifest names is among those that are applied together."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from penstock.deploy.kubernetes.bundle import FOLDERS, bundle, manifests
from penstock.deploy.kubernetes.monitors import watched
from penstock.deploy.kubernetes.plan import Plan
from tests.unit.deploy.plans import everything, smallest, smallest_bundle

COMMON = ("core", "prometheus", "grafana", "gateway-api")
VARIANTS = {
    "servers": (*COMMON, "servers", "keda", "inference-pool"),
    "kserve": (*COMMON, "kserve", "kserve-keda", "inference-pool"),
    "ray": (*COMMON, "ray"),
}
PICKER = "endpoint-picker"  # another project's, as the documentation says


class Applied:
    """All objects of one way, by kind and name, and the pods they lead to."""

    def __init__(self, plan: Plan, variant: str) -> None:
        self.plan = plan
        made = [item for path, item in manifests(plan).items() if path.split("/")[0] in VARIANTS[variant]]
        assert len({(item["kind"], item["metadata"]["name"]) for item in made}) == len(made)
        self.objects = made
        self.pods = [pod for item in made for pod in self._pods(item)]

    def of(self, kind: str) -> dict[str, dict]:
        return {item["metadata"]["name"]: item for item in self.objects if item["kind"] == kind}

    def deployments(self) -> set[str]:
        # KServe makes a Deployment of each service's predictor.
        return {*self.of("Deployment"), *(f"{name}-predictor" for name in self.of("InferenceService"))}

    def selected(self, selector: dict[str, str]) -> list[dict]:
        return [pod for pod in self.pods if selector.items() <= pod["metadata"]["labels"].items()]

    def _pods(self, item: dict) -> list[dict]:
        if item["kind"] == "Deployment":
            return [item["spec"]["template"]]
        if item["kind"] == "InferenceService":
            predictor = item["spec"]["predictor"]
            runtime = self.of("ServingRuntime")[predictor["model"]["runtime"]]
            return [{"metadata": {"labels": predictor["labels"]}, "spec": {**runtime["spec"], **predictor}}]
        if item["kind"] == "RayService":
            cluster = item["spec"]["rayClusterConfig"]
            return [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]
        return []


def ports(pod: dict) -> dict[str, int]:
    (container,) = pod["spec"]["containers"]
    return {port["name"]: port["containerPort"] for port in container.get("ports", ())}


@pytest.fixture(params=["smallest", "everything"])
def plan(request: pytest.FixtureRequest, tmp_path: Path) -> Plan:
    return smallest() if request.param == "smallest" else everything(tmp_path)


@pytest.fixture(params=list(VARIANTS))
def applied(request: pytest.FixtureRequest, plan: Plan) -> Applied:
    return Applied(plan, request.param)


def test_every_service_leads_to_a_port_of_pods_that_are_there(applied):
    services = applied.of("Service")
    assert len(services) == 2
    for service in services.values():
        pods = applied.selected(service["spec"]["selector"])
        assert len(pods) == 1
        assert service["spec"]["ports"][0]["targetPort"] in ports(pods[0])


def test_the_gateway_looks_for_servers_at_a_service_that_is_there(applied):
    fleet = tomllib.loads(applied.of("ConfigMap")[f"{applied.plan.settings.name}-gateway"]["data"]["fleet.toml"])
    (section,) = fleet["discovery"]["kubernetes"]
    service = applied.of("Service")[section["service"]]
    assert section["port"] in [port["name"] for port in service["spec"]["ports"]]
    (pod,) = applied.selected(service["spec"]["selector"])
    assert pod["spec"]["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_budgets_and_pools_are_of_pods_that_are_there(applied):
    for budget in applied.of("PodDisruptionBudget").values():
        assert len(applied.selected(budget["spec"]["selector"]["matchLabels"])) == 1
    for pool in applied.of("InferencePool").values():
        (pod,) = applied.selected(pool["spec"]["selector"]["matchLabels"])
        assert pool["spec"]["targetPorts"][0]["number"] in ports(pod).values()
        assert pool["spec"]["endpointPickerRef"]["name"].endswith(PICKER)


def test_a_node_can_be_emptied_of_servers_whatever_owns_them(applied):
    """Of pods that no Deployment owns a cluster knows no number to take away from."""
    budgets = {name: item["spec"] for name, item in applied.of("PodDisruptionBudget").items()}
    settings = applied.plan.settings
    server = budgets.pop(settings.name, None)
    assert [item["maxUnavailable"] for item in budgets.values()] == [1]  # the gateways'
    if not applied.of("RayService"):
        assert server is not None
        assert (server["maxUnavailable"], "minAvailable" in server) == (1, False)
    elif settings.replicas < 2:
        assert server is None
    else:
        assert server is not None
        assert (server["minAvailable"], "maxUnavailable" in server) == (settings.replicas - 1, False)


def test_prometheus_scrapes_servers_and_gateways_as_the_jobs_that_alerts_name(applied):
    (monitor,) = applied.of("PodMonitor").values()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    pods = applied.selected(monitor["spec"]["selector"]["matchLabels"])
    scraped = [
        pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in pods if endpoint["port"] in ports(pod)
    ]
    job = endpoint["relabelings"][0]["replacement"]
    subject = watched(applied.plan)
    assert {f'job="{job.replace("$1", component)}"' for component in scraped} == {
        subject.server_job,
        subject.gateway_job,
    }


def test_what_is_scaled_is_there(applied):
    for scaled in applied.of("ScaledObject").values():
        assert scaled["spec"]["scaleTargetRef"]["name"] in applied.deployments()
    assert bool(applied.of("ScaledObject")) is not bool(applied.of("RayService"))  # Ray scales by itself


def test_every_route_leads_to_something_that_is_there(applied):
    for route in applied.of("HTTPRoute").values():
        (backend,) = route["spec"]["rules"][0]["backendRefs"]
        assert backend["name"] in applied.of(backend.get("kind", "Service"))


def test_accounts_and_files_of_every_pod_are_there(applied):
    secrets = {f"{applied.plan.settings.name}-keys", "our-keys", applied.plan.settings.metrics_secret_name}
    for pod in applied.pods:
        account = pod["spec"].get("serviceAccountName")
        assert account is None or account in applied.of("ServiceAccount")
        for volume in pod["spec"]["volumes"]:
            if "configMap" in volume:
                assert volume["configMap"]["name"] in applied.of("ConfigMap")
            assert volume.get("secret", {}).get("secretName") in {None, *secrets}


def test_a_ray_worker_has_one_server_on_the_port_it_tells(plan):
    (service,) = Applied(plan, "ray").of("RayService").values()
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    arguments = application["args"]
    assert ports(group["template"])["http"] == arguments["port"] != 8000  # which Ray Serve's own proxy takes
    assert float(group["rayStartParams"]["num-cpus"]) == arguments["cpus"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert float(limits.get(plan.settings.gpu_resource, 0)) == arguments["gpus"]


def test_every_file_says_what_it_is_applied_with():
    for path, text in smallest_bundle().items():
        folder = path.split("/")[0]
        if path.endswith(".yaml") and folder != "compose":
            assert text.startswith(f"# {folder}: {FOLDERS[folder]}\n"), path


def test_a_gateway_that_scales_leaves_no_other_way():
    made = manifests(smallest(gateway_scales=True, gateways=1))
    assert {path.split("/")[0] for path in made} == {*COMMON, "servers", "inference-pool"}


def test_the_only_host_of_another_namespace_is_prometheus(plan):
    hosts = {host for text in bundle(plan).values() for host in re.findall(r"[a-z0-9.-]+\.svc\b", text)}
    assert hosts <= {"prometheus-operated.monitoring.svc"}
