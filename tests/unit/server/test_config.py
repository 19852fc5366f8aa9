"""The server's configuration: safe by default, resolved once, explained."""

import hashlib
import os

import pytest

from penstock.config import gather
from penstock.errors import ConfigError
from penstock.server.config import resolve


def resolved(**given):
    return resolve(gather(given, environ={}))


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nname = "a"\nsha256 = "{hashlib.sha256(b"k").hexdigest()}"\n')
    return str(path)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_loopback_needs_no_keys(host):
    config, _ = resolved(host=host)
    assert config.host == host
    assert config.keys == ()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org"])
def test_any_other_host_needs_keys(host, keys):
    with pytest.raises(ConfigError, match="--keys"):
        resolved(host=host)
    config, _ = resolved(host=host, keys=keys)
    assert [key.name for key in config.keys] == ["a"]


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 1), (7, 1), (16, 2), (32, 4), (256, 8)])
def test_larger_machines_get_more_workers(monkeypatch, cores, workers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    config, settings = resolved()
    assert config.workers == workers
    assert f"of {cores} cores" in next(setting.why for setting in settings if setting.option == "workers")


def test_a_given_number_of_workers_is_taken():
    assert resolved(workers=5)[0].workers == 5


@pytest.mark.parametrize(
    ("model", "name"),
    [("smollm2-135m", "smollm2-135m"), ("org/model", "org/model"), ("/x/Tiny.Q4_1.gguf", "Tiny.Q4_1")],
)
def test_the_served_name_follows_the_model(model, name):
    assert resolved(model=model)[0].served_name == name


def test_a_folder_is_served_under_its_name(tmp_path):
    assert resolved(model=str(tmp_path))[0].served_name == tmp_path.name


def test_a_served_name_may_be_given():
    assert resolved(served_name="mine")[0].served_name == "mine"


def test_a_chat_template_is_read_at_the_start(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages }}")
    assert resolved(chat_template=str(path))[0].chat_template == "{{ messages }}"
    with pytest.raises(ConfigError, match="cannot be read"):
        resolved(chat_template=str(tmp_path / "none"))
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        resolved(chat_template=str(path))


def test_every_server_option_is_explained_and_no_key_is_shown(keys):
    _, settings = resolved(keys=keys, port=9)
    options = {setting.option for setting in settings}
    assert options >= {"host", "port", "workers", "keys", "max_body_bytes", "drain_seconds", "log_format"}
    assert next(setting.why for setting in settings if setting.option == "port") == "command line"
    assert hashlib.sha256(b"k").hexdigest() not in str(settings)
