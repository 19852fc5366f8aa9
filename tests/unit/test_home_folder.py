"""Paths with a home folder in them: one that is not there is a path like any other, and none at all is told."""

import os
from pathlib import Path

import pytest

from penstock.errors import ConfigError, ModelNotFound
from penstock.home_folder import expand_home, home_folder
from penstock.models import store
from penstock.store.location import default_location


def test_the_users_own_folder_is_put_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand_home("~/a") == tmp_path / "a"
    assert home_folder("--store") == tmp_path


def test_a_home_folder_of_nobody_is_found_missing() -> None:
    assert expand_home("~nobody-of-this-name/a") == Path("~nobody-of-this-name/a")
    with pytest.raises(ModelNotFound, match="there is no model '~nobody-of-this-name/a'"):
        store.resolve("~nobody-of-this-name/a")


def test_a_user_without_a_home_folder_is_told_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "PENSTOCK_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(ConfigError, match=r"^--cache-dir: .* this user has no home folder; give a path"):
        store.cache_folder()
    with pytest.raises(ConfigError, match=r"^--store: .* this user has no home folder; give a path"):
        default_location()
