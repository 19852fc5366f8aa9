"""A registry lists names without imports and loads one member at a time."""

import subprocess
import sys

import pytest

from penstock.registry import Registry


def test_load_returns_the_named_attribute() -> None:
    registry: Registry[object] = Registry("codec", {"json": "json:dumps"})
    import json

    assert registry.load("json") is json.dumps


def test_an_unknown_name_says_what_there_is() -> None:
    registry: Registry[object] = Registry("codec", {"json": "json:dumps", "toml": "tomllib:loads"})
    with pytest.raises(KeyError, match=r"no codec named 'yaml'; there are: json, toml"):
        registry.load("yaml")


def test_names_keep_the_order_of_the_table() -> None:
    registry: Registry[object] = Registry("codec", {"b": "m:x", "a": "m:y"})
    assert registry.names == ["b", "a"]
    assert "a" in registry
    assert "c" not in registry


def test_the_table_given_is_not_shared() -> None:
    table = {"json": "json:dumps"}
    registry: Registry[object] = Registry("codec", table)
    table["toml"] = "tomllib:loads"
    assert registry.names == ["json"]


def test_nothing_is_imported_until_a_member_is_loaded() -> None:
    code = (
        "import sys; from penstock.registry import Registry\n"
        "registry = Registry('codec', {'wave': 'wave:open'})\n"
        "assert registry.names == ['wave'] and 'wave' in registry and 'wave' not in sys.modules\n"
        "registry.load('wave'); assert 'wave' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
