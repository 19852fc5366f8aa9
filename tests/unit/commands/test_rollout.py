"""`penstock rollout`: from the command line to the store that gateways follow."""

import json

import pytest

from penstock.cli import main
from penstock.store.database import Database
from penstock.store.rollouts import RolloutStore


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """A store on which a gateway runs that has replicas of two versions."""
    path = str(tmp_path / "penstock.db")
    monkeypatch.setenv("PENSTOCK_STORE", path)
    database = Database.open(path)
    book = RolloutStore(database)
    book.announce("gateway", json.dumps({"tiny": ["b", "stable"]}))
    yield book
    database.close()


def run(*arguments: str) -> int:
    try:
        return main(["rollout", *arguments])
    except SystemExit as ended:
        return int(ended.code or 0)


def shown(capsys):
    capsys.readouterr()
    assert run("status", "--json") == 0
    return json.loads(capsys.readouterr().out)["rollouts"]


def test_a_rollout_takes_its_steps_from_the_fleets_file(tmp_path, capsys, store):
    store.announce("gateway", json.dumps({"tiny": ["a", "b"]}))
    assert run("start", "tiny", "b") == 2
    assert "no replica serves 'stable'" in capsys.readouterr().err
    file = tmp_path / "fleet.toml"
    file.write_text('[rollouts.tiny]\nstable = "a"\nsteps = [10, 100]\n')
    assert run("start", "tiny", "b", "--fleet", str(file)) == 0
    (report,) = shown(capsys)
    assert report["rollout"]["steps"] == [10, 100]
    assert (report["rollout"]["stable"], report["rollout"]["status"]) == ("a", "running")


def test_status_can_be_a_page_in_a_file(tmp_path, capsys):
    page = tmp_path / "rollout.md"
    assert run("status", "--out", str(page)) == 0
    assert page.read_text() == "No rollout.\n"
    run("start", "tiny", "b")
    run("status", "--out", str(page))
    assert page.read_text().startswith("# Rollout of tiny: stable → b\n")


@pytest.mark.parametrize(
    ("model", "version", "says"),
    [("tinny", "b", "'tinny' is not served here; served: tiny"), ("tiny", "c", "there are: b, stable")],
)
def test_what_no_gateway_has_a_replica_of_is_not_rolled_out(capsys, model, version, says):
    assert run("start", model, version) == 2
    assert says in capsys.readouterr().err
    assert shown(capsys) == []


def test_without_a_gateway_nothing_is_rolled_out(store, capsys):
    store.announce("gateway", "")
    assert run("start", "tiny", "b") == 2
    assert "no gateway runs on this store" in capsys.readouterr().err


@pytest.mark.parametrize("command", [("status",), ("start", "tiny", "b"), ("abort", "tiny")])
def test_a_store_that_is_not_there_is_said_and_not_made(tmp_path, capsys, command):
    mistyped = tmp_path / "penstok" / "penstock.db"
    assert run(*command, "--store", str(mistyped)) == 2
    assert "there is no store" in capsys.readouterr().err
    assert not mistyped.parent.exists()


def test_a_rollout_is_aborted_once(capsys):
    run("start", "tiny", "b")
    assert run("abort", "tiny") == 0
    assert shown(capsys)[0]["rollout"]["status"] == "aborted"
    assert run("abort", "tiny") == 2
    assert run("abort", "other") == 2
