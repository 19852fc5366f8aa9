"""`penstock gateway`: what its help says, what it takes, and what it refuses before it serves."""

import re
import socket

import pytest

from penstock.cli import main
from penstock.commands import gateway


@pytest.fixture
def taken(monkeypatch):
    """What the command would serve with."""
    calls = []
    monkeypatch.setattr(gateway, "run", lambda sourced, wanted: calls.append(sourced.options) or 0)
    return calls


def run(*arguments):
    try:
        return main(("gateway", *arguments))
    except SystemExit as ended:
        return int(ended.code or 0)


def test_the_help_names_the_policies_and_its_own_port(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert run("--help") == 0
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "Port to listen on (default: 8080)" in text
    assert "kv-aware" in text
    assert "8000" not in text


def test_it_listens_on_the_port_that_its_help_says_unless_it_is_told_another(taken):
    assert (run(), run("--port", "81")) == (0, 0)
    assert [options.port for options in taken] == [8080, 81]


def test_a_wrong_entry_of_its_file_is_answered_with_its_own_options(taken, tmp_path, capsys):
    file = tmp_path / "penstock.toml"
    file.write_text("polcy = 'kv-aware'")
    assert run("--config", str(file)) == 2
    text = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert "polcy" in text
    assert "--drain-seconds" in text
    assert "--max-running" not in text
    assert not taken


def test_a_key_file_that_is_not_there_is_refused_at_the_start(tmp_path, capsys):
    file = tmp_path / "fleet.toml"
    file.write_text(f"[[replicas]]\nurl = 'http://127.0.0.1:1'\nkey_file = '{tmp_path}/none.key'\n")
    assert run("--fleet", str(file), "--store", "none", "--port", "0") == 2
    text = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert "none.key" in text
    assert "http://127.0.0.1:1" in text


def test_its_own_address_as_a_replica_is_refused_at_the_start(capsys):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert run("--replica", f"http://localhost:{port}", "--store", "none", "--port", str(port)) == 2
    assert "own address" in re.sub(r"\s+", " ", capsys.readouterr().err)
