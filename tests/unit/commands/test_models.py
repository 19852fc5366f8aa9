"""`penstock models` and `penstock pull` over a cache folder of their own."""

import json
from pathlib import Path

import pytest

from penstock.commands import models
from penstock.config import Options
from penstock.errors import ModelNotFound
from penstock.models import store

ALIAS = store.DEFAULT_MODEL


def place_default_model(cache: Path) -> Path:
    """Put a file of the right size where the store keeps the default model."""
    wheel = store.ALIASES[ALIAS]
    path = cache / "models" / ALIAS / wheel.file_name
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(wheel.file_bytes)
    return path


def test_an_alias_that_is_not_fetched_says_how_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert models.show(Options(cache_dir=str(tmp_path)), as_json=False) == 0
    shown = capsys.readouterr().out
    assert f"penstock pull {ALIAS}" in shown
    assert "93 MB" in shown


def test_a_fetched_model_is_listed_once_with_its_size_and_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = place_default_model(tmp_path)
    models.show(Options(cache_dir=str(tmp_path)), as_json=True)
    assert json.loads(capsys.readouterr().out) == [
        {"name": ALIAS, "revision": None, "bytes": store.ALIASES[ALIAS].file_bytes, "path": str(path)}
    ]


def test_pulling_what_is_there_says_where(
    tmp_path: Path, default_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "models" / ALIAS / default_model_path.name
    path.parent.mkdir(parents=True)
    path.symlink_to(default_model_path)
    assert models.pull(Options(cache_dir=str(tmp_path))) == 0
    assert capsys.readouterr().out == f"{ALIAS} is at {path}\n"


def test_a_pipe_gets_one_line_for_each_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = tmp_path / ("long" * 30)
    path = place_default_model(cache)
    models.show(Options(cache_dir=str(cache)), as_json=False)
    assert capsys.readouterr().out.splitlines()[1].split() == [ALIAS, "98", "MB", str(path)]


def test_a_hub_model_is_listed_with_its_revision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place_default_model(tmp_path)
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (snapshot / "tiny.gguf").write_bytes(b"GGUF")
    models.show(Options(cache_dir=str(tmp_path)), as_json=False)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["model", "revision", "size", "where"]
    assert rows[1][:3] == [ALIAS, "98", "MB"]
    assert rows[2][:2] == ["org/tiny/tiny.gguf", "0123abcd"]


def test_an_interrupted_pull_says_that_it_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "pull", interrupt)
    with pytest.raises(KeyboardInterrupt):
        models.pull(Options(cache_dir=str(tmp_path)))
    assert "the same command goes on from there" in capsys.readouterr().err


def test_pulling_what_nobody_knows_says_what_would_be_right(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="Did you mean smollm2-135m"):
        models.pull(Options(model="smollm2-135", cache_dir=str(tmp_path)))
