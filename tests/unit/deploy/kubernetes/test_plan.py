"""From the options of `penstock serve` to the files in the cluster, and back."""

import dataclasses
import tomllib
from pathlib import Path

import pytest

from penstock.config import Options, gather
from penstock.deploy.kubernetes.locality import is_path
from penstock.deploy.kubernetes.plan import make_plan
from penstock.deploy.kubernetes.settings import Settings, read_settings
from penstock.errors import ConfigError
from penstock.fleet.config import ModelSection
from penstock.fleet.fleet_file import read_fleet
from tests.architecture.markdown import blocks
from tests.unit.deploy.plans import everything, smallest


def written(folder: Path, files, name: str) -> Path:
    path = folder / name
    path.write_text(files[name])
    return path


def test_a_server_in_the_cluster_has_the_options_that_were_given(tmp_path):
    plan = everything(tmp_path)
    read = gather({}, environ={}, file=written(tmp_path, plan.server_files, "serve.toml")).options
    # The store's URL comes from its Secret.
    assert read == plan.options
    assert read.model == "Qwen/Qwen3-8B"
    assert read.kv_memory == "20GiB"
    assert read.prefix_cache is False
    assert read.drain_seconds == 90.5


def test_what_the_cluster_decides_is_not_taken_from_this_machine(tmp_path):
    options = everything(tmp_path).options
    assert (options.host, options.port, options.log_format) == ("::", 8000, "json")
    assert options.cache_dir == "/var/cache/penstock"


def test_files_that_options_name_travel_along(tmp_path):
    plan = everything(tmp_path)
    assert "message.content" in plan.server_files["chat_template.jinja"]
    assert plan.options.chat_template == "/etc/penstock/server/chat_template.jinja"
    assert tomllib.loads(plan.server_files["shared_prefixes.toml"])["prefixes"]


def test_the_same_file_serves_and_deploys(tmp_path):
    config = tmp_path / "penstock.toml"
    config.write_text("max_running = 8\n[deploy]\nreplicas = 3\n")
    sourced = gather({}, environ={}, file=config)
    assert sourced.options.max_running == 8
    assert make_plan(sourced, None, {}).settings.replicas == 3


def test_a_flag_stands_above_the_table(tmp_path):
    config = tmp_path / "penstock.toml"
    config.write_text('[deploy]\nreplicas = 3\nname = "a"\n')
    settings = make_plan(gather({}, environ={}, file=config), None, {"replicas": 5, "name": None}).settings
    assert (settings.replicas, settings.name) == (5, "a")


def test_deploy_is_a_table(tmp_path):
    config = tmp_path / "penstock.toml"
    config.write_text("deploy = 3\n")
    with pytest.raises(ConfigError, match=r"^deploy: 3 .* table: \[deploy\]"):
        gather({}, environ={}, file=config)


def test_the_gateway_finds_the_servers_and_asks_them_with_its_key(tmp_path):
    fleet = read_fleet(written(tmp_path, smallest().gateway_files, "fleet.toml"))
    (section,) = fleet.discovery.kubernetes
    assert (section.service, section.port, section.key_file) == ("penstock", "http", "/etc/penstock/metrics/key")


def test_what_the_operator_said_of_the_fleet_stays(tmp_path):
    fleet = read_fleet(written(tmp_path, everything(tmp_path).gateway_files, "fleet.toml"))
    assert fleet.policy == "session-affinity"
    assert fleet.aliases == {"gpt-4o": "qwen"}
    assert fleet.queue.hold_seconds == 120.0
    assert fleet.discovery.kubernetes


def test_a_fleet_that_says_where_replicas_are_is_left_as_it_is(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text('[[replicas]]\nurl = "http://10.0.0.1:8000"\nkind = "vllm"\n')
    plan = make_plan(gather({}, environ={}), mine, {})
    assert read_fleet(written(tmp_path, plan.gateway_files, "fleet.toml")) == read_fleet(mine)


def test_the_gateway_takes_its_options(tmp_path):
    options = gather({}, environ={}, file=written(tmp_path, everything(tmp_path).gateway_files, "gateway.toml")).options
    assert (options.port, options.drain_seconds, options.host) == (8080, 90.5, "::")


@pytest.mark.parametrize(("option", "setting"), [("store", "store_secret"), ("keys", "keys_secret")])
def test_a_secret_is_refused_and_not_repeated(option, setting):
    sourced = gather({option: "postgresql://user:hunter2@db/penstock"}, environ={})
    with pytest.raises(ConfigError, match=setting) as caught:
        make_plan(sourced, None, {})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("device", "gpus", "right"),
    [
        ("auto", 3, "uses 1: give 1 or 0"),
        ("cuda", 2, "uses 1: give 1,"),
        ("cuda", 0, "uses 1: give 1,"),
        ("cpu", 1, "uses 0: give 0,"),
        ("simulated", 1, "uses 0: give 0,"),
    ],
)
def test_gpus_that_no_rank_would_use_or_that_one_would_lack_are_refused(tmp_path, device, gpus, right):
    with pytest.raises(ConfigError, match=f"^--gpus: {gpus} is not usable; .* {right}"):
        make_plan(gather({"device": device}, environ={}), None, {"gpus": gpus})
    config = tmp_path / "penstock.toml"
    config.write_text(f'device = "{device}"\n[deploy]\ngpus = {gpus}\n')
    with pytest.raises(ConfigError, match=f"^deploy.gpus: {gpus} is not usable; .* {right}"):
        make_plan(gather({}, environ={}, file=config), None, {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("name", "Penstock"),
        ("name", "a" * 41),
        ("namespace", "-x"),
        ("image", "a b"),
        ("replicas", -1),
        ("max_replicas", 1),
        ("gpus", 65),
        ("gpus", -1),
        ("gateways", 0),
        ("memory", "lots"),
        ("hostname", "http://x"),
        ("keys_secret", "psk_1234 secret"),
        ("objective", 1.0),
        ("slow_ttft_seconds", 2.0),
        ("startup_seconds", 1),
        ("prometheus_url", "prometheus"),
    ],
)
def test_a_wrong_setting_is_named_as_it_was_written(name, value):
    with pytest.raises(ConfigError, match=f"^deploy.{name}: "):
        read_settings({name: value}, {})
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')}: "):
        smallest(**{name: value})


def test_a_setting_that_there_is_not_is_named_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"^\[deploy\] replica: 3 .* no such .* replicas, max_repl"):
        read_settings({"replica": 3, "name": "x"}, {})


@pytest.mark.parametrize("address", ["http://[::1", "http://a:b", ",,", "ftp://10.0.0.1"])
def test_what_can_be_no_gateway_is_refused(address):
    with pytest.raises(ConfigError, match=r"--gateway: .* a gateway's URL"):
        make_plan(gather({"gateway": address}, environ={}), None, {})


def test_a_model_of_a_name_that_no_file_can_have_is_no_path():
    assert not is_path("x" * 5000)


def test_a_file_without_an_end_is_refused():
    with pytest.raises(ConfigError, match="must fit a ConfigMap"):
        make_plan(gather({"chat_template": "/dev/zero"}, environ={}), None, {})


def planned(folder: Path, fleet: str = "", *, deploy: str = "", **options: str):
    (folder / "mine.toml").write_text(fleet)
    config = folder / "penstock.toml"
    config.write_text(f"[deploy]\n{deploy}\n")
    return make_plan(gather(options, environ={}, file=config), folder / "mine.toml", {})


BACKEND = "[autoscaler.smollm2-135m]\nbackend = "


@pytest.mark.parametrize(
    ("fleet", "field", "instead"),
    [
        (BACKEND + '{ kind = "local", serve = ["m"] }', r"autoscaler.*\.backend.kind", 'kind = "kubernetes"'),
        (
            BACKEND + '{ kind = "kubernetes", deployment = "penstock" }',
            "autoscaler.smollm2-135m.backend.kind",
            "gateway_scales",
        ),
        (BACKEND + '{ kind = "ray" }', r"autoscaler.*\.backend.dashboard", "that pods reach"),
        ('key_file = "/home/me/key"', "key_file", "give /etc/penstock/metrics/key"),
        ('replicas = [{ url = "http://10.0.0.1", key_file = "k" }]', r"replicas\[0\].key_file", "metrics/key"),
        ('discovery = { dns = [{ name = "x", port = 1, key_file = "k" }] }', r"dns\[0\].key_file", "metrics/key"),
        ('replicas = [{ url = "http://127.0.0.1:8000" }]', r"replicas\[0\].url", "that pods reach"),
        ('replicas = [{ url = "http://localhost:8000" }]', r"replicas\[0\].url", "that pods reach"),
        ('replicas = [{ url = "http://[::1]:8000" }]', r"replicas\[0\].url", "that pods reach"),
        ('discovery = { dns = [{ name = "localhost", port = 1 }] }', r"dns\[0\].name", "that pods reach"),
        ("discovery = { ray = [{}] }", r"ray\[0\].address", "ray://HEAD:10001"),
    ],
)
def test_a_fleet_file_that_only_works_on_this_machine_is_refused(tmp_path, fleet, field, instead):
    with pytest.raises(ConfigError, match=f"--fleet: .*{field}") as caught:
        planned(tmp_path, fleet)
    assert instead in str(caught.value)


SCALES = "gateway_scales = true\ngateways = 1"
OURS = '{ kind = "kubernetes", deployment = "penstock" }'


@pytest.mark.parametrize(
    ("backend", "elsewhere"),
    [(OURS, ""), ('{ kind = "external" }', ""), (OURS, 'replicas = [{ url = "http://10.0.0.1" }]\n')],
)
def test_an_autoscaler_of_a_model_that_the_servers_do_not_serve_is_refused(tmp_path, backend, elsewhere):
    fleet = f'{elsewhere}[autoscaler."Qwen/Qwen3-8B"]\nbackend = {backend}'
    options = {"model": "Qwen/Qwen3-8B", "served_name": "qwen"}
    with pytest.raises(ConfigError, match=r"--fleet: autoscaler.Qwen/Qwen3-8B: .* \[autoscaler.\"qwen\"\]"):
        planned(tmp_path, fleet, deploy=SCALES, **options)
    planned(tmp_path, fleet, deploy=SCALES, model="Qwen/Qwen3-8B")


def test_others_servers_may_be_scaled_by_others_under_any_name(tmp_path):
    fleet = 'replicas = [{ url = "http://10.0.0.1" }]\n[autoscaler.theirs]\nbackend = { kind = "external" }'
    assert planned(tmp_path, fleet).fleet.autoscaler


def test_a_gateway_scales_the_deployment_that_it_may_scale(tmp_path):
    deploy = "gateway_scales = true\ngateways = 1"
    backend = '{ kind = "kubernetes", deployment = "%s" }'
    with pytest.raises(ConfigError, match="'other' is not usable; give penstock"):
        planned(tmp_path, BACKEND + backend % "other", deploy=deploy)
    plan = planned(tmp_path, BACKEND + backend % "penstock", deploy=deploy)
    assert read_fleet(written(tmp_path, plan.gateway_files, "fleet.toml")).autoscaler["smollm2-135m"].backend["kind"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("model", "/models/llama"),
        ("model", "model.gguf"),
        ("model", "~/llama"),
        ("simulated_profile", "/tmp/profile.json"),
        ("gateway", "unix:/tmp/admin.sock"),
        ("gateway", "https://gateway.example.com,http://127.0.0.1:8080"),
    ],
)
def test_an_option_that_only_works_on_this_machine_is_refused(tmp_path, option, value):
    with pytest.raises(ConfigError, match=option.replace("_", "-")):
        planned(tmp_path, **{option: value})


def test_a_model_may_be_in_the_claim_or_in_the_image(tmp_path):
    assert planned(tmp_path, deploy="model_in_image = true", model="/models/llama").options.model == "/models/llama"
    path = "/var/cache/penstock/llama"
    assert planned(tmp_path, deploy='cache_claim = "models"', model=path).options.model == path
    with pytest.raises(ConfigError, match="cache_claim"):
        planned(tmp_path, model=path)


@pytest.mark.parametrize(
    ("deploy", "fleet", "seconds"),
    [
        ("", "", 10.0),  # there is always a server: one that is away comes back soon, or others answer
        ("replicas = 0", "", 1020.0),  # what a server may take to start, and two minutes for its pod
        ("replicas = 0\nstartup_seconds = 86400", "", 86400.0),
        ("replicas = 0", "[queue]\nhold_seconds = 30.0", 30.0),
        ("replicas = 0", "[queue]\nhold_seconds = 10.0", 10.0),  # on purpose, though it is the default elsewhere
        (
            "gateway_scales = true\ngateways = 1",
            BACKEND + '{ kind = "kubernetes", deployment = "penstock" }\nmin_replicas = 0',
            1020.0,
        ),
    ],
)
def test_requests_to_a_fleet_at_zero_are_held_until_a_server_can_be_there(tmp_path, deploy, fleet, seconds):
    plan = planned(tmp_path, fleet, deploy=deploy)
    assert read_fleet(written(tmp_path, plan.gateway_files, "fleet.toml")).queue.patience_seconds == seconds


def test_a_gateway_of_a_fleet_at_zero_waits_for_its_model_alone(tmp_path):
    def fleet_of(fleet="", deploy="replicas = 0", **options):
        plan = planned(tmp_path, fleet, deploy=deploy, **options)
        return read_fleet(written(tmp_path, plan.gateway_files, "fleet.toml"))

    declared = fleet_of('policy = "kv-aware"')
    assert declared.models == {Options().model: ModelSection(policy="kv-aware")}
    assert declared.names_all_models
    assert not fleet_of(deploy="").models  # there is always a server, whose word counts
    assert not fleet_of("[queue]\nhold_unknown = true").names_all_models
    elsewhere = fleet_of('[[replicas]]\nurl = "http://10.0.0.1:8000"')
    assert not (elsewhere.models or elsewhere.names_all_models)


def test_an_unknown_setting_is_named(tmp_path):
    config = tmp_path / "penstock.toml"
    config.write_text("[deploy]\nreplcas = 3\n")
    with pytest.raises(ConfigError, match="replcas"):
        make_plan(gather({}, environ={}, file=config), None, {})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("memory = 32", r"deploy\.memory: 32 is not usable; it must be `str`"),
        ("gpus = 1.5", r"deploy\.gpus: 1\.5 "),
        ('image = "penstock@sha256:12"', r"deploy\.image: "),
        ('image = "a:b:c"', r"deploy\.image: "),
    ],
)
def test_a_setting_that_is_not_usable_is_named(tmp_path, line, said):
    config = tmp_path / "penstock.toml"
    config.write_text(f"[deploy]\n{line}\n")
    with pytest.raises(ConfigError, match=said):
        make_plan(gather({}, environ={}, file=config), None, {})


@pytest.mark.parametrize(
    "image", ["penstock", "registry:5000/a/penstock:1.2", "ghcr.io/a/penstock:1.2@sha256:" + "0a" * 32]
)
def test_images_have_registries_tags_and_digests(image):
    assert read_settings({"image": image}, {}).image == image


def test_cores_may_be_written_as_a_number():
    assert read_settings({"cpu": 4}, {}).cpu == "4"


def test_a_file_that_is_wrong_is_told_before_anything_is_deployed(tmp_path):
    prefixes = tmp_path / "prefixes.toml"
    prefixes.write_text("nothing = 1\n")
    with pytest.raises(ConfigError, match="--shared-prefixes"):
        make_plan(gather({"shared_prefixes": str(prefixes)}, environ={}), None, {})


def test_every_option_survives(tmp_path):
    """Each option alone, with a value that is not its default."""
    owned = {"host", "port", "keys", "store", "admin_listen", "cache_dir", "log_format", "chat_template"}
    values = {bool: "false", int: "16", float: "7.5"}
    for item in dataclasses.fields(gather({}, environ={}).options):
        if item.name in owned | {"shared_prefixes", "tensor_parallel"}:
            continue
        choices = item.metadata.get("choices")
        kind = next((kind for kind in values if kind.__name__ in str(item.type)), None)
        value = choices[-1] if choices else values[kind] if kind else "1GiB"
        value = "http://10.0.0.1:8080" if item.name == "gateway" else value
        value = str(item.metadata["low"]) if kind is int and item.metadata["low"] > 16 else value
        sourced = gather({item.name: value}, environ={})
        plan = make_plan(sourced, None, {})
        read = gather({}, environ={}, file=written(tmp_path, plan.server_files, "serve.toml")).options
        assert getattr(read, item.name) == getattr(sourced.options, item.name), item.name


def test_the_documentation_shows_every_setting_and_its_default():
    document = Path(__file__).parents[4] / "docs" / "operations.md"
    (block,) = (item for item in blocks(document) if item.text.startswith("[deploy]"))
    shown = tomllib.loads(block.text)["deploy"]
    assert set(shown) | {"gpus"} == set(Settings.__struct_fields__)
    assert read_settings(shown, {}) == Settings()
