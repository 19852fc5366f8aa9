"""What is to run on a Ray cluster, from the options of a server and the flags of the command."""

import dataclasses
from pathlib import Path

import pytest

from penstock.config import Sourced, gather
from penstock.deploy.ray_serve.settings import ReplicaSettings, Wanted, make_settings, serve_arguments
from penstock.errors import ConfigError


def sourced(**options):
    return gather(options, environ={})


def test_a_rank_is_a_bundle_and_all_of_them_are_equal():
    settings = ReplicaSettings(num_ranks=2, cpus_per_rank=4, gpus_per_rank=1)
    assert settings.bundles == [{"CPU": 4, "GPU": 1}, {"CPU": 4, "GPU": 1}]


def test_a_bundle_does_not_ask_for_none_of_something():
    assert ReplicaSettings(cpus_per_rank=1, gpus_per_rank=0).bundles == [{"CPU": 1}]


def test_only_what_was_given_is_passed_on_to_the_server():
    given = sourced(model="org/name", max_running=4, prefix_cache=False, host="10.0.0.1")
    assert serve_arguments(given) == ("org/name", "--max-running", "4", "--no-prefix-cache")


def test_a_file_of_this_machine_is_named_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("keys.toml").write_text("")
    assert serve_arguments(sourced(keys="keys.toml")) == ("--keys", str(tmp_path / "keys.toml"))


def test_a_server_listens_on_its_nodes_address_unless_told_otherwise():
    assert make_settings(sourced(), Wanted()).replica.host is None
    assert make_settings(sourced(host="127.0.0.1"), Wanted()).replica.host == "127.0.0.1"


def test_a_server_has_any_port_unless_there_is_one_for_it():
    assert make_settings(sourced(), Wanted()).replica.port is None
    assert make_settings(sourced(), Wanted(port=8001)).replica.port == 8001


def test_ranks_follow_the_servers_own_option():
    options = dataclasses.replace(sourced().options, tensor_parallel=2)
    settings = make_settings(Sourced(options, {}), Wanted(gpus=1))
    assert settings.replica.bundles == [{"CPU": 1, "GPU": 1}] * 2


@pytest.mark.parametrize(
    ("options", "wanted", "named"),
    [
        ({"port": 8000}, {}, "--port"),
        ({}, {"policy": "sideways"}, "--policy"),
        ({}, {"replicas": 3, "max_replicas": 2}, "--max-replicas"),
        ({}, {"cpus": 0.0}, "--cpus"),
        ({}, {"replicas": 0}, "--replicas"),
        ({}, {"name": "a/b"}, "--name"),
        ({}, {"cpus": float("nan")}, "--cpus"),
        ({}, {"gpus": -1.0}, "--gpus"),
        ({}, {"gpus": 3.0}, "--gpus: 3.0 is not usable; a rank of a server with --device auto uses 1"),
        ({"device": "cpu"}, {"gpus": 0.5}, "--gpus"),
        ({"device": "cuda"}, {"gpus": 0.0}, "--gpus: 0.0 is not usable; a server with --device cuda finds none then"),
        ({}, {"port": 70000}, "--port"),
        ({}, {"route_prefix": "v1"}, "--route-prefix"),
    ],
)
def test_what_cannot_work_is_refused_by_name(options, wanted, named):
    with pytest.raises(ConfigError, match=named):
        make_settings(sourced(**options), Wanted(**wanted))
