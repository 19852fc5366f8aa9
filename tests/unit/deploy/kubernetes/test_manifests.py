"""What the manifests say: that pods drain before they end, find each other, hold no secrets and have no rights."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from penstock.config import gather
from penstock.deploy.kubernetes.bundle import bundle, manifests
from penstock.deploy.kubernetes.plan import make_plan
from penstock.fleet.fleet_file import read_fleet
from penstock.server import supervisor, worker
from tests.architecture.source_tree import REPOSITORY
from tests.custom_resources import check
from tests.unit.deploy.plans import everything, smallest, smallest_bundle


@pytest.fixture
def made() -> dict:
    return manifests(smallest())


@pytest.fixture
def full(tmp_path: Path) -> dict:
    return manifests(everything(tmp_path))


def pods(made: dict) -> dict:
    """Every pod by who makes it."""
    ray = made["ray/rayservice.yaml"]["spec"]["rayClusterConfig"]
    return {
        "server": made["servers/deployment.yaml"]["spec"]["template"]["spec"],
        "gateway": made["core/gateway-deployment.yaml"]["spec"]["template"]["spec"],
        "ray head": ray["headGroupSpec"]["template"]["spec"],
        "ray worker": ray["workerGroupSpecs"][0]["template"]["spec"],
        "kserve": {
            **made["kserve/servingruntime.yaml"]["spec"],
            **made["kserve/inferenceservice.yaml"]["spec"]["predictor"],
        },
    }


@pytest.mark.parametrize("who", ["server", "gateway", "ray head", "ray worker", "kserve"])
def test_a_pod_has_no_right_it_need_not_have(made, who):
    pod = pods(made)[who]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["requests"]["memory"]
    assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("who", ["server", "gateway", "ray head", "ray worker", "kserve"])
def test_no_service_of_the_cluster_becomes_an_option_of_the_server(made, who):
    # A service called penstock would give every pod a variable PENSTOCK_PORT.
    assert pods(made)[who]["enableServiceLinks"] is False


@pytest.mark.parametrize("who", ["server", "gateway", "ray head", "ray worker", "kserve"])
@pytest.mark.parametrize("plan", ["made", "full"])
def test_whatever_is_mounted_is_a_volume_of_the_pod(request, plan, who):
    pod = pods(request.getfixturevalue(plan))[who]
    mounted = [item["name"] for item in pod["containers"][0]["volumeMounts"]]
    assert sorted(mounted) == sorted(item["name"] for item in pod["volumes"])


@pytest.mark.parametrize("who", ["server", "gateway"])
@pytest.mark.parametrize("drain_seconds", ["0", "30", "90.5"])
def test_a_pod_may_stay_for_as_long_as_the_whole_drain_takes(who, drain_seconds):
    plan = make_plan(gather({"drain_seconds": drain_seconds}, environ={}), None, {})
    pod = pods(manifests(plan))[who]
    hook = int(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    ending = 2 * supervisor._STOP_SECONDS + worker._LAST_WORDS_SECONDS
    assert pod["terminationGracePeriodSeconds"] >= hook + float(drain_seconds) + ending


def test_a_server_is_ready_when_it_says_so_and_restarted_only_when_it_says_nothing(made):
    (container,) = pods(made)["server"]["containers"]
    asked = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert asked == {"startup": "/ready", "readiness": "/ready", "liveness": "/live"}


def test_a_server_may_take_as_long_as_was_said_to_load_its_model(full):
    probe = pods(full)["server"]["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1801
    assert full["servers/deployment.yaml"]["spec"]["progressDeadlineSeconds"] > 1801


def test_a_gateway_is_reached_while_there_is_no_server(made):
    assert pods(made)["gateway"]["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/live"


def test_only_the_gateway_may_ask_the_cluster_and_only_for_endpoints(made):
    assert made["core/gateway-role.yaml"]["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list"]}
    ]
    (subject,) = made["core/gateway-rolebinding.yaml"]["subjects"]
    assert subject["name"] == pods(made)["gateway"]["serviceAccountName"]
    assert pods(made)["server"]["automountServiceAccountToken"] is False


def test_a_gateway_that_scales_may_scale_these_servers_and_nothing_else_does():
    made = manifests(smallest(gateway_scales=True, gateways=1))
    assert made["core/gateway-role.yaml"]["rules"][1] == {
        "apiGroups": ["apps"],
        "resources": ["deployments/scale"],
        "resourceNames": ["penstock"],
        "verbs": ["get", "patch"],
    }
    check(made["core/gateway-role.yaml"])
    assert "keda/scaledobject.yaml" not in made


def test_files_that_change_replace_the_pods(tmp_path):
    before = manifests(smallest())["servers/deployment.yaml"]["spec"]["template"]["metadata"]["annotations"]
    after = manifests(everything(tmp_path))["servers/deployment.yaml"]["spec"]["template"]["metadata"]["annotations"]
    assert before != after


def test_gpus_are_asked_for_where_the_server_uses_them():
    def resources(device: str) -> dict:
        plan = make_plan(gather({"device": device}, environ={}), None, {})
        return pods(manifests(plan))["server"]["containers"][0]["resources"]["limits"]

    assert resources("cuda")["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in resources("cpu")
    assert "nvidia.com/gpu" not in resources("simulated")


def test_secrets_are_named_and_never_written(full):
    """Whatever holds a secret is a reference to a Secret."""
    environment = {item["name"]: item for item in pods(full)["server"]["containers"][0]["env"]}
    assert environment["PENSTOCK_STORE"]["valueFrom"]["secretKeyRef"] == {"name": "our-store", "key": "url"}
    assert environment["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    volumes = {item["name"]: item for item in pods(full)["gateway"]["volumes"]}
    assert volumes["keys"]["secret"]["secretName"] == "our-keys"
    assert volumes["metrics"]["secret"]["secretName"] == "our-metrics"


def test_keys_are_in_the_store_where_only_a_store_is_named():
    sourced = gather({}, environ={})
    plan = make_plan(sourced, None, {"store_secret": "ours"})
    assert "keys" not in [item["name"] for item in pods(manifests(plan))["server"]["volumes"]]
    assert "keys =" not in plan.server_files["serve.toml"]
    assert "store =" not in plan.server_files["serve.toml"]


def test_prometheus_asks_with_the_key_that_opens_metrics(full):
    (endpoint,) = full["prometheus/podmonitor.yaml"]["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "our-metrics", "key": "key"}


def test_only_the_api_is_routed(full):
    for path in ("gateway-api/httproute.yaml", "inference-pool/httproute.yaml"):
        spec = full[path]["spec"]
        (rule,) = spec["rules"]
        assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]
        assert spec["hostnames"] == ["llm.example.com"]
        assert spec["parentRefs"] == [{"name": "edge"}]


def test_the_autoscaler_scales_the_servers_within_their_bounds(full):
    spec = full["keda/scaledobject.yaml"]["spec"]
    assert spec["scaleTargetRef"]["name"] == full["servers/deployment.yaml"]["metadata"]["name"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (0, 3)
    assert {item["metadata"]["serverAddress"] for item in spec["triggers"]} == {"https://prometheus.example.com"}


def test_kserve_runs_what_the_deployment_runs(made):
    ours = dict(made["servers/deployment.yaml"]["spec"]["template"]["spec"]["containers"][0])
    theirs = dict(made["kserve/servingruntime.yaml"]["spec"]["containers"][0])
    assert theirs.pop("name") == "kserve-container"
    assert theirs.pop("ports")[0]["containerPort"] == ours.pop("ports")[0]["containerPort"]
    assert theirs == {name: value for name, value in ours.items() if name != "name"}


def test_ray_serve_takes_its_configuration(full):
    schema = pytest.importorskip("ray.serve.schema")
    config = yaml.safe_load(full["ray/rayservice.yaml"]["spec"]["serveConfigV2"])
    (application,) = schema.ServeDeploySchema.model_validate(config).applications
    assert application.import_path == "penstock.deploy.ray_serve.application:build"


def test_ray_gets_the_servers_own_options(full):
    config = yaml.safe_load(full["ray/rayservice.yaml"]["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    options = application["args"]["options"]
    assert options["model"] == "Qwen/Qwen3-8B"
    assert options["prefix_cache"] is False
    assert options["keys"] == "/etc/penstock/keys/keys.toml"
    assert not {"host", "port", "admin_listen"} & set(options)
    assert application["route_prefix"] is None


def test_the_same_options_give_the_same_files(tmp_path):
    assert bundle(everything(tmp_path)) == bundle(everything(tmp_path))


def test_every_object_is_of_the_deployment(full):
    for path, made in full.items():
        metadata = made["metadata"]
        assert metadata["name"].startswith(("qwen", "models")), path
        assert metadata.get("namespace", "models") == "models", path
        assert re.fullmatch(r"[a-z0-9-]+", metadata["name"]), path


def test_the_image_is_the_one_that_pods_expect(made):
    image = (REPOSITORY / "Dockerfile").read_text()
    pod = pods(made)["server"]
    folder = next(item["mountPath"] for item in pod["containers"][0]["volumeMounts"] if item["name"] == "cache")
    user = pod["securityContext"]["runAsUser"]
    assert f"USER {user}:{user}" in image
    assert f"chown {user}:{user} {folder}" in image
    assert 'ENTRYPOINT ["penstock"]' in image
    extras = re.findall(r"EXTRAS=(\S+)$", image, flags=re.MULTILINE)[-1].split(",")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert set(extras) <= set(project["optional-dependencies"])


def test_compose_listens_on_loopback_only_and_knows_secrets_as_files():
    document = yaml.safe_load(smallest_bundle()["compose/compose.yaml"])
    for service in document["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        assert service["cap_drop"] == ["ALL"]
    assert all(secret["file"].startswith("./secrets/") for secret in document["secrets"].values())


def test_compose_gives_each_server_gpus_of_its_own():
    services = yaml.safe_load(bundle(smallest(replicas=3, gpus=1))["compose/compose.yaml"])["services"]
    servers = {name: item for name, item in services.items() if name.startswith("server")}
    numbers = [
        number
        for item in servers.values()
        for device in item["deploy"]["resources"]["reservations"]["devices"]
        for number in device["device_ids"]
    ]
    assert numbers == ["0", "1", "2"]
    first, *others = servers
    assert (first, others) == ("server", ["server-2", "server-3"])
    for name in others:  # found as the first is, and not started unless asked for: the machine may have fewer
        assert servers[name]["networks"] == {"default": {"aliases": ["server"]}}
        assert servers[name]["profiles"] == ["more-servers"]
    assert "profiles" not in servers[first]


def test_compose_without_gpus_has_one_service_that_can_be_scaled():
    services = yaml.safe_load(bundle(smallest(replicas=3, gpus=0))["compose/compose.yaml"])["services"]
    assert sorted(services) == ["gateway", "grafana", "prometheus", "server"]
    assert "deploy" not in services["server"]


def test_compose_says_how_all_its_users_can_read_their_secrets():
    head = smallest_bundle()["compose/compose.yaml"].partition("name:")[0]
    for words in ("chmod 700 secrets", "chmod 444 secrets/*", "10001, 65534 and 472"):
        assert words in head


def test_compose_gets_of_a_fleet_file_only_what_one_machine_has(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text(
        'policy = "round-robin"\n[discovery]\nkubernetes = [{ service = "x", port = "http" }]\n'
        '[autoscaler.smollm2-135m]\nbackend = { kind = "kubernetes", deployment = "penstock" }\n'
    )
    plan = make_plan(gather({}, environ={}), mine, {"gateway_scales": True, "gateways": 1})
    (tmp_path / "fleet.toml").write_text(bundle(plan)["compose/gateway/fleet.toml"])
    fleet = read_fleet(tmp_path / "fleet.toml")
    assert (fleet.policy, fleet.discovery.kubernetes, fleet.autoscaler) == ("round-robin", (), {})
    (servers,) = fleet.discovery.dns
    document = yaml.safe_load(bundle(plan)["compose/compose.yaml"])
    assert servers.name in document["services"]
    assert servers.key_file in [item.get("target") for item in document["services"]["gateway"]["secrets"]]


def test_compose_mounts_only_files_that_are_written():
    files = smallest_bundle()
    document = yaml.safe_load(files["compose/compose.yaml"])
    for service in document["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert any(path.startswith(f"compose/{source[2:]}") for path in files), source
            else:
                assert source in document["volumes"]
