"""`penstock rollout`: from the command line to the store that gateways follow."""

import json

import pytest

from penstock.cli import main


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_STORE", str(tmp_path / "penstock.db"))


def run(*arguments: str) -> int:
    try:
        return main(["rollout", *arguments])
    except SystemExit as ended:
        return int(ended.code or 0)


def shown(capsys):
    capsys.readouterr()
    assert run("status", "--json") == 0
    return json.loads(capsys.readouterr().out)["rollouts"]


def test_a_rollout_takes_its_steps_from_the_fleets_file(tmp_path, capsys):
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


def test_a_rollout_is_aborted_once(capsys):
    run("start", "tiny", "b")
    assert run("abort", "tiny") == 0
    assert shown(capsys)[0]["rollout"]["status"] == "aborted"
    assert run("abort", "tiny") == 2
    assert run("abort", "other") == 2
