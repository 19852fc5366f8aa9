"""Every file is what its reader takes, as strictly as the reader's own schema says it."""

import copy
import importlib.resources
import json

import jsonschema
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from penstock.deploy.kubernetes.bundle import FOLDERS, bundle, manifests
from penstock.deploy.kubernetes.plan import Plan
from tests.custom_resources import OLDEST, InvalidManifest, check, is_custom
from tests.unit.deploy.plans import everything, smallest

PATHS = list(manifests(smallest()))
RAY_BUDGET = "ray/poddisruptionbudget.yaml"  # of two servers or more, which `everything` has not
CUSTOM = [path for path, made in manifests(smallest()).items() if is_custom(made)]


@pytest.fixture(scope="module", params=["smallest", "everything"])
def plan(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return everything(tmp_path_factory.mktemp("deploy")) if request.param == "everything" else smallest()


@pytest.fixture(scope="module")
def files(plan: Plan) -> dict[str, str]:
    return bundle(plan)


@pytest.mark.parametrize("path", PATHS)
def test_a_cluster_takes_the_manifest(plan, files, path):
    if path == RAY_BUDGET and plan.settings.replicas < 2:
        assert path not in files
    else:
        check(yaml.safe_load(files[path]))


@pytest.mark.parametrize("path", [path for path in PATHS if path not in CUSTOM])
def test_an_older_cluster_takes_it_too(path, tmp_path):
    check({**manifests(smallest()), **manifests(everything(tmp_path))}[path], OLDEST)


def test_servers_without_gpus_are_taken():
    check(manifests(smallest(gpus=0))["servers/deployment.yaml"])


@pytest.mark.parametrize("path", [path for path in PATHS if "configmap" not in path and "namespace" not in path])
def test_a_misspelt_field_would_be_noticed(path):
    made = copy.deepcopy(manifests(smallest())[path])
    inner = next((made[name] for name in ("spec", "roleRef") if name in made), made)
    inner["replcas"] = 1
    with pytest.raises(InvalidManifest, match="replcas"):
        check(made)


def test_a_misspelt_field_deep_in_a_pod_would_be_noticed():
    made = manifests(smallest())["ray/rayservice.yaml"]
    pod = made["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]
    pod["containers"][0]["securityContext"]["readOnlyRootFileSystem"] = True
    with pytest.raises(InvalidManifest, match="readOnlyRootFileSystem"):
        check(made)


def test_the_kinds_of_other_projects_are_all_checked_by_their_own_schemas():
    assert sorted({manifests(smallest())[path]["kind"] for path in CUSTOM}) == [
        "HTTPRoute",
        "InferencePool",
        "InferenceService",
        "PodMonitor",
        "PrometheusRule",
        "RayService",
        "ScaledObject",
        "ServingRuntime",
    ]


def test_compose_takes_the_compose_file(files, compose_schema):
    assert list(compose_schema.iter_errors(yaml.safe_load(files["compose/compose.yaml"]))) == []


def test_a_misspelt_field_of_compose_would_be_noticed(files, compose_schema):
    document = yaml.safe_load(files["compose/compose.yaml"])
    document["services"]["server"]["comand"] = ["serve"]
    assert any("comand" in error.message for error in compose_schema.iter_errors(document))


@pytest.fixture(scope="module")
def compose_schema() -> jsonschema.Draft202012Validator:
    """Compose's own, as check-jsonschema carries it."""
    file = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    schema = json.loads(file.read_text())
    return jsonschema.validators.validator_for(schema)(schema)


def test_the_dashboard_is_json_and_the_same_wherever_it_is(files):
    config_map = yaml.safe_load(files["grafana/configmap.yaml"])
    assert config_map["data"]["penstock.json"] == files["grafana/penstock.json"]
    assert json.loads(files["grafana/penstock.json"])["title"] == "Penstock"


def test_grafana_knows_every_field_of_the_dashboard(files):
    written = json.loads(files["grafana/penstock.json"])
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(written)))
    assert lost(written, read) == []


def lost(written: object, read: object, path: str = "dashboard") -> list[str]:
    """Return the paths of what was written and not read."""
    match written, read:
        case dict(), dict():
            gone = [f"{path}.{name}" for name in written if name not in read]
            return gone + [item for name in written if name in read for item in lost(written[name], read[name], name)]
        case list(), list() if len(written) == len(read):
            return [item for pair in zip(written, read, strict=True) for item in lost(*pair, path)]
    return [] if written == read else [path]


def test_what_grafana_does_not_know_would_be_noticed(files):
    written = json.loads(files["grafana/penstock.json"])
    written["panels"][1]["legnd"] = True
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(written)))
    assert lost(written, read) == ["panels.legnd"]


def test_every_folder_is_told_of(files):
    assert {path.split("/")[0] for path in files} == set(FOLDERS)
