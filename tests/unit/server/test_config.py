"""The server's configuration: safe by default, resolved once, explained."""

import hashlib
import os
from functools import partial
from pathlib import Path

import pytest

from penstock import machine
from penstock.config import gather
from penstock.errors import ConfigError
from penstock.server.config import admin_address, resolve
from penstock.server.store_opening import prepare_store
from penstock.store.database import Database
from penstock.store.keys import KeyStore
from penstock.tenants import KeyTerms


def resolved(**given):
    return resolve(gather(given, environ={}))


def resolved_on(monkeypatch, root, cores):
    """On a machine of so many cores, whose system's files are under `root`."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setattr(machine, "usable_cores", partial(machine.usable_cores, root))
    return resolved()


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
def test_larger_machines_get_more_workers(monkeypatch, tmp_path, cores, workers):
    config, settings = resolved_on(monkeypatch, tmp_path, cores)
    assert config.workers == workers
    assert f"of {cores} cores" in next(setting.why for setting in settings if setting.option == "workers")


@pytest.mark.parametrize(("quota", "cores", "workers"), [(50_000, "0.5", 1), (200_000, "2", 1), (1_650_000, "16.5", 2)])
def test_a_containers_quota_counts_as_its_cores(monkeypatch, tmp_path, quota, cores, workers):
    limit = tmp_path / "sys/fs/cgroup/cpu.max"
    limit.parent.mkdir(parents=True)
    limit.write_text(f"{quota} 100000\n")
    config, settings = resolved_on(monkeypatch, tmp_path, 64)
    assert config.workers == workers
    assert f"of {cores} cores" in next(setting.why for setting in settings if setting.option == "workers")


def test_a_given_number_of_workers_is_taken():
    assert resolved(workers=5)[0].workers == 5


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("org/model", "org/model"),
        ("/x/Tiny.Q4_1.gguf", "Tiny.Q4_1"),
        ("/x/TINY.GGUF", "TINY"),
    ],
)
def test_the_served_name_follows_the_model(model, name):
    assert resolved(model=model)[0].served_name == name


def test_a_folder_is_served_under_its_name(tmp_path, monkeypatch):
    assert resolved(model=str(tmp_path))[0].served_name == tmp_path.name
    assert resolved(model=str(tmp_path / "config.json"))[0].served_name == tmp_path.name
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert resolved(model=f"~/{tmp_path.name}")[0].served_name == tmp_path.name
    (tmp_path / "link").symlink_to(tmp_path)
    assert resolved(model=str(tmp_path / "link"))[0].served_name == "link"
    monkeypatch.chdir(tmp_path)
    assert resolved(model=".")[0].served_name == tmp_path.name


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


@pytest.fixture
def store(tmp_path):
    return str(tmp_path / "penstock.db")


def stored_keys(location):
    database = Database.open(location)
    return database, KeyStore(database)


def test_keys_in_the_store_open_a_server_beyond_loopback(store):
    with pytest.raises(ConfigError, match="penstock keys create"):
        resolved(host="0.0.0.0", store=store)
    assert not os.path.exists(store), "asking makes nothing"
    database, keys = stored_keys(store)
    keys.create("alice", KeyTerms())
    config = prepare_store(resolved(host="0.0.0.0", store=store)[0])
    assert ([key.name for key in config.keys], config.needs_keys) == (["alice"], True)
    database.close()


def test_a_store_whose_keys_are_all_revoked_is_not_open(store):
    database, keys = stored_keys(store)
    keys.create("alice", KeyTerms())
    keys.revoke("alice")
    for host in ("127.0.0.1", "0.0.0.0"):
        config = prepare_store(resolved(host=host, store=store)[0])
        assert (config.keys, config.needs_keys) == ((), True)
    database.close()


def test_a_store_without_keys_leaves_a_loopback_server_open(store):
    config = prepare_store(resolved(store=store)[0])
    assert (config.keys, config.needs_keys) == ((), False)


def test_a_store_that_is_there_and_cannot_be_read_never_opens_the_server(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "penstock").mkdir()
    (tmp_path / "penstock" / "penstock.db").write_text("no database " * 1000)
    with pytest.raises(ConfigError, match="no SQLite database"):
        prepare_store(resolved()[0])


def test_a_keys_file_takes_the_place_of_the_stores_keys(store, keys):
    database, stored = stored_keys(store)
    stored.create("alice", KeyTerms())
    assert [key.name for key in prepare_store(resolved(store=store, keys=keys)[0]).keys] == ["a"]
    database.close()


def test_keys_with_limits_need_a_store(tmp_path):
    path = tmp_path / "limited.toml"
    digest = hashlib.sha256(b"k").hexdigest()
    path.write_text(f'[[keys]]\nname = "a"\nsha256 = "{digest}"\nlimits = {{ requests_per_minute = 1 }}\n')
    with pytest.raises(ConfigError, match="--store"):
        resolved(keys=str(path), store="none")
    assert resolved(keys=str(path))[0].store is not None


def test_a_default_store_that_cannot_be_made_is_done_without(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    config = prepare_store(resolved()[0])
    assert config.store is None
    assert "no usage is kept" in caplog.text


def test_a_store_that_was_asked_for_must_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        prepare_store(resolved(store=str(tmp_path / "file" / "s.db"))[0])


@pytest.mark.parametrize("address", ["0.0.0.0:1", "example.org:80", "8001", "127.0.0.1", "127.0.0.1:99999", ":1"])
def test_admin_routes_listen_on_loopback_or_a_unix_socket_only(address):
    with pytest.raises(ConfigError, match="--admin-listen"):
        resolved(admin_listen=address)


@pytest.mark.parametrize(
    ("text", "address"),
    [("127.0.0.1:81", ("127.0.0.1", 81)), ("[::1]:0", ("::1", 0)), ("unix:/run/p.sock", Path("/run/p.sock"))],
)
def test_where_admin_routes_may_listen(text, address):
    assert admin_address(resolved(admin_listen=text)[0].admin) == address


def test_a_password_in_the_stores_url_is_not_explained():
    _, settings = resolved(store="postgresql://me:hunter2@127.0.0.1:1/x")
    assert "hunter2" not in str(settings)
