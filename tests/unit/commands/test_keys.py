"""`penstock keys` and `penstock usage`: the store from the command line."""

import hashlib
import json

import pytest

from penstock.cli import main
from penstock.request import Targets
from penstock.store.database import Database
from penstock.store.keys import KeyStore
from penstock.store.ledger import add_usage
from penstock.tenants import KeyTerms, Limits, Usage


@pytest.fixture
def store(tmp_path, monkeypatch):
    location = str(tmp_path / "penstock.db")
    monkeypatch.setenv("PENSTOCK_STORE", location)
    return location


def run(*arguments: str) -> int:
    try:
        return main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)


def stored(location):
    database = Database.open(location)
    keys = KeyStore(database).load()
    database.close()
    return keys


def digest(secret):
    return hashlib.sha256(secret.encode()).hexdigest()


def test_a_created_key_is_alone_on_standard_output(store, capsys):
    assert run("keys", "create", "alice") == 0
    secret = capsys.readouterr().out.removesuffix("\n")
    (key,) = stored(store)
    assert (key.name, key.sha256, key.terms) == ("alice", digest(secret), KeyTerms())


def test_every_term_has_a_flag(store):
    flags = {
        "--weight": "2", "--priority": "3", "--models": "a, b", "--requests-per-minute": "1",
        "--input-tokens-per-minute": "2", "--output-tokens-per-minute": "3", "--concurrent-requests": "4",
        "--tokens-per-day": "5", "--longest-context": "6", "--ttft-seconds": "0.5", "--time-per-token-seconds": "0.1",
        "--deadline-seconds": "60",
    }  # fmt: skip
    assert run("keys", "create", "alice", "--admin", *[part for pair in flags.items() for part in pair]) == 0
    (key,) = stored(store)
    assert key.terms == KeyTerms(
        admin=True,
        weight=2.0,
        priority=3,
        models=("a", "b"),
        limits=Limits(
            requests_per_minute=1,
            input_tokens_per_minute=2,
            output_tokens_per_minute=3,
            concurrent_requests=4,
            tokens_per_day=5,
            longest_context=6,
        ),
        targets=Targets(ttft_seconds=0.5, time_per_token_seconds=0.1, deadline_seconds=60.0),
    )


def test_the_list_shows_limits_and_targets(store, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    run("keys", "create", "alice", "--requests-per-minute", "60", "--ttft-seconds", "0.5")
    run("keys", "create", "bob")
    capsys.readouterr()
    assert run("keys", "list") == 0
    _, alice, bob = capsys.readouterr().out.splitlines()
    assert "requests_per_minute 60" in alice and "ttft_seconds 0.5" in alice
    assert bob.split()[-2:] == ["none", "none"]


@pytest.mark.parametrize("value", ["nan", "inf", "1e999", "-1", "much"])
@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("--ttft-seconds", "give a number over 0"),
        ("--time-per-token-seconds", "give a number over 0"),
        ("--weight", "give a number from 0.001 to 1000"),
    ],
)
def test_what_is_no_number_within_a_flags_bounds_is_told_the_bounds(store, capsys, name, right, value):
    assert run("keys", "create", "alice", name, value) == 2
    assert capsys.readouterr().err == f"{name}: {value!r} is not usable; {right}\n"


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many"])
def test_a_limit_that_is_no_whole_number_over_0_is_told_so(store, capsys, value):
    assert run("keys", "create", "alice", "--requests-per-minute", value) == 2
    right = "give a whole number of at least 1"
    assert capsys.readouterr().err == f"--requests-per-minute: {value!r} is not usable; {right}\n"


def test_a_priority_out_of_bounds_is_told_the_bounds(store, capsys):
    assert run("keys", "create", "alice", "--priority", "11") == 2
    assert capsys.readouterr().err == "--priority: '11' is not usable; give a whole number from -10 to 10\n"


def test_a_rotated_key_has_a_new_secret_beside_the_old(store, capsys):
    run("keys", "create", "alice", "--json")
    old = json.loads(capsys.readouterr().out)["key"]
    assert run("keys", "rotate", "alice", "--overlap", "2h", "--json") == 0
    new = json.loads(capsys.readouterr().out)["key"]
    ends = {key.sha256: key.expires_at for key in stored(store)}
    assert ends[digest(new)] is None
    assert ends[digest(old)] is not None


def test_a_revoked_key_is_listed_as_such(store, capsys):
    run("keys", "create", "alice")
    assert run("keys", "revoke", "alice") == 0
    capsys.readouterr()
    assert run("keys", "list") == 0
    assert "revoked" in capsys.readouterr().out
    run("keys", "list", "--json")
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed["revoked_at"] is not None
    assert stored(store) == ()


@pytest.mark.parametrize(
    "arguments",
    [
        ["create", "a b"],
        ["create", "open"],
        ["create", "a", "--weight", "0"],
        ["revoke", "nobody"],
        ["rotate", "nobody"],
        ["rotate", "nobody", "--overlap", "soon"],
        ["rotate", "nobody", "--overlap", "31d"],
        ["rotate", "nobody", "--overlap", "9" * 400 + "s"],
        ["list", "--store", "none"],
        ["list", "--store", "mysql://x/y"],
    ],
)
def test_a_mistake_ends_in_one_sentence_and_status_2(store, capsys, arguments):
    assert run("keys", *arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1


@pytest.mark.parametrize(
    "command", [("usage",), ("keys", "list"), ("keys", "revoke", "nobody"), ("keys", "rotate", "nobody")]
)
def test_only_making_a_key_makes_a_store(tmp_path, capsys, command):
    mistyped = tmp_path / "penstok" / "penstock.db"
    assert run(*command, "--store", str(mistyped)) == 2
    assert capsys.readouterr().err.startswith(f"--store: '{mistyped}' is not usable; there is no store")
    assert not mistyped.parent.exists()
    assert run("keys", "create", "alice", "--store", str(mistyped)) == 0


@pytest.mark.parametrize("command", [("usage",), ("keys", "list")])
def test_before_anything_ran_there_is_nothing_to_show(tmp_path, monkeypatch, command):
    monkeypatch.delenv("PENSTOCK_STORE", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert run(*command) == 0


def test_usage_is_shown_by_tenant_and_day(store, capsys):
    database = Database.open(store)
    with database.writing() as connection:
        entries = [("alice", "2026-01-01", 1), ("bob", "2026-01-01", 2), ("alice", "2026-01-02", 3)]
        add_usage(connection, [Usage(tenant=name, model="m", day=day, requests=n) for name, day, n in entries])
    database.close()

    def shown(*arguments):
        assert run("usage", "--json", *arguments) == 0
        return [(entry["tenant"], entry["day"]) for entry in json.loads(capsys.readouterr().out)]

    assert len(shown()) == 3
    assert shown("--tenant", "alice") == [("alice", "2026-01-01"), ("alice", "2026-01-02")]
    assert shown("--since", "2026-01-02") == [("alice", "2026-01-02")]
    assert shown("--since", "1d") == []
    assert run("usage") == 0
    assert "alice" in capsys.readouterr().out
    assert run("usage", "--since", "monday") == 2
    assert run("usage", "--since", "²d") == 2
