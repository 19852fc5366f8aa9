"""The fleet's file: what it says, and what it says that is wrong."""

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.fleet.config import (
    AutoscalerSection,
    DiscoverySection,
    FleetConfig,
    HealthSection,
    QueueSection,
    ReplicaEntry,
)
from penstock.fleet.fleet_file import check_entry, check_key_files, check_not_itself, read_fleet
from penstock.fleet.rollout.plan import DEFAULT_VERSION, RolloutSection
from tests.architecture.markdown import blocks

DOCUMENT = Path(__file__).parents[3] / "docs" / "operations.md"

FILE = """
policy = "session-affinity"
aliases = { gpt-4 = "tiny" }

[[replicas]]
url = "http://10.0.0.1:8000"
kind = "vllm"
max_in_flight = 32

[models.tiny]
policy = "round-robin"

[discovery]
dns = [{ name = "replicas.local", port = 8000 }]

[queue]
max_wait_seconds = 5
"""


def test_a_file_and_the_command_line_add_up(tmp_path):
    file = tmp_path / "fleet.toml"
    file.write_text(FILE)
    fleet = read_fleet(file, ["http://127.0.0.1:1"], "power-of-two")
    assert [(entry.url, entry.kind) for entry in fleet.replicas] == [
        ("http://10.0.0.1:8000", "vllm"),
        ("http://127.0.0.1:1", "penstock"),
    ]
    assert (fleet.policy_of("tiny"), fleet.policy_of("other")) == ("round-robin", "power-of-two")
    assert fleet.discovery.dns[0].name == "replicas.local"
    assert fleet.queue.max_wait_seconds == 5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("polcy = 'x'", "polcy"),
        ("policy = 'fastest'", "round-robin"),
        ("policy = 'fastest'", "--fleet policy: 'fastest'"),
        ("models.x.policy = 'fastest'", "--fleet models.x.policy: 'fastest' .* round-robin"),
        ("replicas = [{url = 'localhost:8000'}]", "http://127.0.0.1:8000"),
        ("replicas = [{url = 'http://a:x'}]", "http://127.0.0.1:8000"),
        (
            "replicas = [{url = 'http://b'}, {url = 'http://a:8/v1'}]",
            r"replicas\[1\].url: .* gateway adds: http://a:8$",
        ),
        ("replicas = [{url = 'http://a/v1/'}]", "leave out the path"),
        ("replicas = [{url = 'http://a/llm/v1/chat/completions'}]", "leave out the path"),
        ("replicas = [{url = 'http://a/metrics'}]", "leave out the path"),
        ("replicas = [{url = 'http://a', kind = 'other'}]", r"replicas\[0\].kind: 'other' .* llama.cpp"),
        ("replicas = [{url = 'http://a', max_in_flight = 0}]", r"replicas\[0\].max_in_flight: 0"),
        ("replicas = [{url = 'http://a', version = 'a b'}]", r"replicas\[0\].version: 'a b'"),
        ("discovery.dns = [{name = 'x', port = 1, kind = 'y'}]", r"discovery.dns\[0\].kind: 'y'"),
        ("discovery.dns = [{name = 'x', port = 70000}]", r"discovery.dns\[0\].port: 70000 .* 65535"),
        ("autoscaler.m.backend = {kind = 'magic'}", "local, kubernetes"),
        ("autoscaler.m.backend = {kind = 'local'}", "serve"),
        ("autoscaler.m.backend = {kind = 'external', serve = []}", "serve"),
        ("autoscaler.m = {}", "backend"),
        ("autoscaler.m = {backend = {kind = 'external'}, policy = 'magic'}", "queue-length"),
        ("autoscaler.m = {backend = {kind = 'external'}, min_replicas = 5}", "max_replicas"),
        ("autoscaler.m = {backend = {kind = 'external'}, warm_replicas = -1}", "warm_replicas"),
        ("autoscaler.m = {backend = {kind = 'external'}, target_utilization = 2.0}", "target_utilization"),
        ("autoscaler.m = {backend = {kind = 'external'}, interval_seconds = 0.0}", "interval_seconds"),
        ("autoscaler.m = {backend = {kind = 'external'}, interval_seconds = nan}", "interval_seconds"),
        ("autoscaler.m = {backend = {kind = 'external'}, idle_seconds = inf}", "86400 seconds"),
        ("aliases = {a = 'm'}\nmodels.a.policy = 'kv-aware'", "name the model, 'm'"),
        ("aliases = {a = 'm'}\nrollouts.a = {}", "name the model, 'm'"),
        ("rollouts.m.stable = 'v 1'", "letters, digits"),
        ("rollouts.m.tenants = {alice = ''}", "letters, digits"),
        (
            "replicas = [{url = 'http://a'}, {url = 'http://a'}]",
            r"replicas\[1\].url: .* replicas\[0\].url is",
        ),
        (
            "replicas = [{url = 'http://a'}, {url = 'http://A:80/', version = 'b'}]",
            r"replicas\[1\].url: .* once",
        ),
        (
            "discovery.dns = [{name = 'x', port = 1}, {name = 'x', port = 1, version = 'b'}]",
            r"discovery.dns\[1\]: 'x:1' .* once",
        ),
        (
            "discovery.kubernetes = [{service = 'x', port = 1}, {service = 'x', port = 1, kind = 'vllm'}]",
            r"discovery.kubernetes\[1\]: '/x:1' .* once",
        ),
        (
            "discovery.kubernetes = [{service = '', port = 1}]",
            r"\[0\].service: '' .* small letters",
        ),
        ("discovery.kubernetes = [{service = 'a,b=c', port = 1}]", r"discovery.kubernetes\[0\].service: 'a,b=c'"),
        ("discovery.kubernetes = [{service = 'x', port = 1, namespace = 'a/b'}]", r"\[0\].namespace: 'a/b'"),
        ("discovery.kubernetes = [{service = 'x', port = ''}]", r"\[0\].port: ''"),
        ("discovery.kubernetes = [{service = 'x', port = '80'}]", r"\[0\].port: '80' .* without quotes"),
        ("discovery.ray = [{}, {version = 'b'}]", r"discovery.ray\[1\]: 'auto/penstock' .* once"),
        ("discovery.ray = [{version = 'a b'}]", r"discovery.ray\[0\].version: 'a b'"),
        ("aliases = { a = 'b', b = 'c' }", "aliases.a: 'b' .* alias itself: give the name that replicas use"),
        ("aliases = { a = 'a' }", "aliases.a: 'a' .* alias itself"),
        ("aliases = { '' = 'm' }", "aliases: {'': 'm'} .* neither name may be empty"),
        ("aliases = { a = ' ' }", "aliases: {'a': ' '} .* neither name may be empty"),
        ("models.''.policy = 'kv-aware'", "--fleet models: '' .* a model's name"),
        (
            "replicas = [{url = 'http://localhost:8000'}, {url = 'http://127.0.0.1:8000', version = 'b'}]",
            r"replicas\[1\].url: 'http://127.0.0.1:8000' .* replicas\[0\].url is the same server",
        ),
        (
            "replicas = [{url = 'http://[::1]:8000'}, {url = 'http://localhost:8000/'}]",
            r"replicas\[1\].url: 'http://localhost:8000/' .* replicas\[0\].url is the same server",
        ),
        (
            "rollouts.m.split = { stable = 50, b = 20 }",
            "rollouts.m.split: {'stable': 50.0, 'b': 20.0} .* leave 'stable' out, .* 100 together",
        ),
        (
            "autoscaler.m.backend = {kind = 'local', serve = ['m', '--port', '9']}",
            "autoscaler.m.backend.*serve: '--port' .* leave --host and --port out",
        ),
        (
            "autoscaler.m.backend = {kind = 'local', serve = ['m', '--host=::']}",
            "autoscaler.m.backend.*serve: '--host=::' .* leave --host and --port out",
        ),
        (
            "autoscaler.m.backend = {kind = 'local', serve = ['m'], devices = ['0', '1', '0']}",
            r"autoscaler.m.backend.*devices\[2\]: '0' .* once",
        ),
        ("[[", "TOML"),
    ],
)
def test_a_mistake_is_named(tmp_path, text, says):
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_fleet(file)


@pytest.mark.parametrize(
    "text",
    [
        # Servers of either kind of address may stand side by side on one port, and localhost on another.
        "replicas = [{url = 'http://127.0.0.1:8000'}, {url = 'http://[::1]:8000'}, {url = 'http://localhost:8001'}]",
        "rollouts.m.split = { b = 10 }",
        "rollouts.m.split = { stable = 66.6, b = 33.4 }",
        # Models that need little of a device may share it.
        "autoscaler.a.backend = {kind = 'local', serve = ['a'], devices = ['0']}\n"
        "autoscaler.b.backend = {kind = 'local', serve = ['b'], devices = ['0']}",
    ],
)
def test_what_only_looks_like_a_mistake_is_taken(tmp_path, text):
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    assert read_fleet(file) != FleetConfig()


@pytest.mark.parametrize("url", ["http://10.0.0.1:8000", "http://10.0.0.1:8000/"])
def test_a_replica_of_the_file_is_not_named_again_on_the_command_line(tmp_path, url):
    file = tmp_path / "fleet.toml"
    file.write_text(FILE)
    with pytest.raises(ConfigError, match=r"--replica: .* --fleet replicas\[0\].url is the same server"):
        read_fleet(file, [url])
    with pytest.raises(ConfigError, match=r"--replica: .* --replica is the same server"):
        read_fleet(None, ["http://a", "http://a"])


def test_servers_behind_one_proxy_are_not_the_same():
    assert len(read_fleet(None, ["http://proxy/a", "http://proxy/b", "https://proxy/a"]).replicas) == 3


def test_the_file_in_the_document_is_right_and_says_the_defaults(tmp_path):
    (block,) = (item for item in blocks(DOCUMENT) if item.language == "toml" and "[[replicas]]" in item.text)
    file = tmp_path / "fleet.toml"
    file.write_text(block.text)
    fleet = read_fleet(file)
    assert (fleet.policy, fleet.health) == (FleetConfig().policy, HealthSection())
    assert fleet.queue == QueueSection(hold_seconds=QueueSection().patience_seconds, hold_unknown=True)
    assert not FleetConfig().names_all_models
    assert fleet.discovery.lease_seconds == DiscoverySection().lease_seconds
    assert (fleet.rollouts["smollm2-135m"], fleet.replicas[0].version) == (RolloutSection(), DEFAULT_VERSION)
    autoscaler = fleet.autoscaler["smollm2-135m"]
    assert autoscaler == AutoscalerSection(backend=autoscaler.backend)
    assert (fleet.discovery.dns[0].refresh_seconds, fleet.discovery.kubernetes[0].refresh_seconds) == (5.0, 2.0)


def test_a_model_that_is_autoscaled_is_declared(tmp_path):
    file = tmp_path / "fleet.toml"
    file.write_text("policy = 'power-of-two'\nautoscaler.m.backend = {kind = 'external'}")
    fleet = read_fleet(file)
    assert (set(fleet.models), fleet.policy_of("m")) == ({"m"}, "power-of-two")


def test_a_model_that_is_only_declared_has_the_fleets_policy(tmp_path):
    file = tmp_path / "fleet.toml"
    file.write_text("policy = 'power-of-two'\n[models.m]\n[models.n]\npolicy = 'round-robin'")
    fleet = read_fleet(file)
    assert (fleet.policy_of("m"), fleet.policy_of("n")) == ("power-of-two", "round-robin")
    assert fleet.policies == {"power-of-two", "round-robin"}


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_fleet(tmp_path / "none.toml")


@pytest.mark.parametrize(
    "text",
    ["[health]\nprobe_seconds = -1", "[health]\nprobe_seconds = nan", "[queue]\nmax_waiting_per_tenant = 0"],
)
def test_numbers_that_no_clock_or_queue_could_use_are_refused(tmp_path, text):
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        read_fleet(file)


NO_HOSTS = ["a..b", "a" * 64, "a b", ".a", "a%20b", "a.b" * 90]


@pytest.mark.parametrize("host", NO_HOSTS)
def test_a_host_that_can_be_none_is_refused_wherever_it_is_named(tmp_path, host):
    file = tmp_path / "fleet.toml"
    file.write_text(f"discovery.dns = [{{name = '{host}', port = 1}}]")
    with pytest.raises(ConfigError, match=r"discovery.dns\[0\].name: .* can be no host: give parts of"):
        read_fleet(file)
    with pytest.raises(ConfigError, match=r"--replica: .* its host can be none: give an address"):
        read_fleet(None, [f"http://{host}:1"])
    with pytest.raises(ConfigError, match=r"url: .* its host can be none"):
        check_entry(ReplicaEntry(url=f"http://{host}:1"))


@pytest.mark.parametrize(
    "host", ["a", "a.", "a_b.local", "10.0.0.1", "[::1]", "[fe80::1%eth0]", "b\u00fccher.example", "a" * 63]
)
def test_names_and_addresses_are_hosts(host):
    assert read_fleet(None, [f"http://{host}:1"]).replicas


@pytest.mark.parametrize("url", ["http://a\tb:1", "http://a:1/x y", "http://a:1\n", "http://a:0"])
def test_a_url_has_no_blanks_and_no_port_that_there_is_not(url):
    with pytest.raises(ConfigError, match="such as http://127"):
        read_fleet(None, [url])


def test_a_replica_may_be_behind_a_path_of_its_own():
    assert read_fleet(None, ["http://proxy/llama-8b/"]).replicas[0].url == "http://proxy/llama-8b/"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [((["http://a:8000/v1"],), "--replica: .* leave out the path"), (([], "fastest"), "--policy: 'fastest'")],
)
def test_a_mistake_on_the_command_line_is_named_as_one(arguments, says):
    with pytest.raises(ConfigError, match=says):
        read_fleet(None, *arguments)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("key_file = 'FILE'", "--fleet key_file: .* all replicas without one"),
        ("replicas = [{url = 'http://a', key_file = 'FILE'}]", r"replicas\[0\].key_file: .* the key for http://a"),
        ("discovery.dns = [{name = 'x', port = 1, key_file = 'FILE'}]", r"discovery.dns\[0\].key_file"),
        ("autoscaler.m.backend = {kind = 'local', serve = [], key_file = 'FILE'}", "autoscaler.m.backend.key_file"),
        ("discovery.ray = [{key_file = 'FILE'}]", r"the replicas of discovery.ray\[0\]"),
    ],
)
def test_a_key_file_that_is_missing_or_empty_is_named_with_its_replica(tmp_path, text, says):
    key_file = tmp_path / "replica.key"
    file = tmp_path / "fleet.toml"
    file.write_text(text.replace("FILE", str(key_file)))
    fleet = read_fleet(file)
    for _ in range(2):
        with pytest.raises(ConfigError, match=says) as caught:
            check_key_files(fleet)
        assert str(key_file) in str(caught.value)
        key_file.write_text("\n")
    key_file.write_text("psk-1\n")
    check_key_files(fleet)


@pytest.mark.parametrize(
    ("host", "urls", "is_itself"),
    [
        ("127.0.0.1", ["http://b:1", "http://localhost:8080"], True),
        ("127.0.0.1", ["http://127.0.0.1:8000"], False),
        ("0.0.0.0", ["http://[::1]:8080"], True),
        ("10.0.0.1", ["http://10.0.0.1:8080/"], True),
        ("10.0.0.1", ["http://10.0.0.2:8080"], False),
    ],
)
def test_a_gateway_that_is_its_own_replica_is_refused(host, urls, is_itself):
    fleet = read_fleet(None, urls)
    if not is_itself:
        check_not_itself(fleet, host, 8080)
        return
    with pytest.raises(ConfigError, match="the gateway's own address"):
        check_not_itself(fleet, host, 8080)
