"""Names of models resolved to files: aliases, folders, GGUF files and hub ids."""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import pytest

from penstock.errors import ModelError, ModelNotFound
from penstock.models import store
from penstock.models.wheel import WheelModel
from tests.fakes import fake_hub
from tests.fakes.file_server import FileServer, serving

FOLDER_FILES = ("config.json", "tokenizer.json", "model.safetensors")


def make_folder(path: Path, *names: str) -> Path:
    path.mkdir()
    for name in names:
        (path / name).write_bytes(b"{}")
    return path


# ---------------------------------------------------------------- local files


def test_a_gguf_file_is_a_model_named_after_it(tmp_path: Path) -> None:
    (tmp_path / "tiny.Q4_1.gguf").touch()
    files = store.resolve(str(tmp_path / "tiny.Q4_1.gguf"))
    assert (files.name, files.kind, files.path) == ("tiny.Q4_1", "gguf", tmp_path / "tiny.Q4_1.gguf")
    assert files.config is None


def test_a_link_is_a_model_by_its_own_name_whatever_it_leads_to(tmp_path: Path) -> None:
    blob = tmp_path / "b179c9"
    blob.touch()
    (tmp_path / "tiny.gguf").symlink_to(blob)
    file = store.resolve(str(tmp_path / "tiny.gguf"))
    assert (file.name, file.kind, file.path) == ("tiny", "gguf", tmp_path / "tiny.gguf")
    folder = make_folder(tmp_path / "bare")
    (folder / "config.json").symlink_to(blob)
    bare = store.resolve(str(folder / "config.json"), load_format="dummy")
    assert (bare.name, bare.path, bare.config) == ("bare", folder, folder / "config.json")
    (tmp_path / "link").symlink_to(folder)
    assert store.resolve(str(tmp_path / "link"), load_format="dummy").name == "link"


def test_a_relative_path_is_made_absolute_and_has_its_folder_s_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "tiny", *FOLDER_FILES)
    monkeypatch.chdir(folder)
    assert (store.resolve(".").name, store.resolve(".").path) == ("tiny", folder)
    monkeypatch.chdir(make_folder(folder / "inner"))
    above = store.resolve("..")
    assert (above.name, above.path.is_absolute()) == ("tiny", True)


def test_a_hugging_face_folder_is_a_model(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny", *FOLDER_FILES)
    files = store.resolve(str(folder))
    assert (files.name, files.kind, files.path) == ("tiny", "folder", folder)
    assert files.config == folder / "config.json"


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny", "a.gguf")
    assert store.resolve(str(folder)).path == folder / "a.gguf"


def test_a_folder_with_several_gguf_files_asks_which(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny", "a.gguf", "b.gguf")
    with pytest.raises(ModelNotFound, match=r"several .gguf files; give one of them: a\.gguf, b\.gguf"):
        store.resolve(str(folder))


def test_what_a_folder_lacks_is_listed(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny", "tokenizer.json")
    with pytest.raises(ModelNotFound, match=r"tiny: the folder lacks config\.json, \*\.safetensors"):
        store.resolve(str(folder))


def test_pickled_weights_are_refused_with_a_sentence(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny", "config.json", "tokenizer.json", "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match=r"pytorch_model\.bin holds pickled weights.*save the model as safetensors"):
        store.resolve(str(folder))


def test_a_sentencepiece_model_alone_says_how_to_convert_it(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny", "config.json", "tokenizer.model", "model.safetensors")
    with pytest.raises(ModelNotFound, match=r"convert tokenizer\.model"):
        store.resolve(str(folder))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    with pytest.raises(ModelNotFound, match="no model file"):
        store.resolve(str(tmp_path / "model.onnx"))


def test_a_pipe_is_no_model_and_nobody_waits_for_its_content(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ModelNotFound, match="no model file"):
        store.resolve(str(tmp_path / "model.gguf"))


def test_a_gguf_file_may_have_its_suffix_in_capitals(tmp_path: Path) -> None:
    (tmp_path / "TINY.GGUF").touch()
    assert store.resolve(str(tmp_path / "TINY.GGUF")).kind == "gguf"


def test_a_name_that_no_file_can_have_is_not_found() -> None:
    with pytest.raises(ModelNotFound, match="it cannot be looked at"):
        store.resolve("a" * 300)


def test_a_bare_config_is_enough_for_random_weights(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny", "config.json")
    for model in (folder, folder / "config.json"):
        files = store.resolve(str(model), load_format="dummy")
        assert (files.kind, files.config, files.load_format) == ("folder", folder / "config.json", "dummy")


def test_random_weights_without_a_config_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny", "tokenizer.json")
    with pytest.raises(ModelNotFound, match=r"the folder lacks config\.json"):
        store.resolve(str(folder), load_format="dummy")


@pytest.mark.parametrize("model", ["smollm2-135", "SmolLM2-135M", "smollm"])
def test_a_misspelt_alias_is_answered_with_the_right_one(model: str) -> None:
    with pytest.raises(ModelNotFound, match=r"Did you mean smollm2-135m\?"):
        store.resolve(model)


@pytest.mark.parametrize("model", ["./nothing/here", "/nothing/here.gguf", "~/nothing", "a/b/c", "", "no such model"])
def test_what_exists_nowhere_is_not_found_and_never_asked_of_the_hub(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelNotFound, match="give an alias"):
        store.resolve(model)


# ---------------------------------------------------------------- aliases


@pytest.fixture
def alias(monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """An alias whose file is small."""
    model = WheelModel("tiny", "1", "0" * 64, 10, "tiny.gguf", hashlib.sha256(b"GGUF").hexdigest(), 4)
    monkeypatch.setattr(store, "ALIASES", MappingProxyType({"tiny": model}))
    return model


def install(alias: WheelModel, cache: Path) -> Path:
    path = cache / "models" / "tiny" / alias.file_name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    return path


def test_an_alias_that_is_here_needs_no_network(alias: WheelModel, tmp_path: Path) -> None:
    path = install(alias, tmp_path)
    files = store.resolve("tiny", cache_dir=tmp_path)
    assert (files.name, files.kind, files.path, files.source) == ("tiny", "gguf", path, "tiny")
    assert store.pull("tiny", cache_dir=tmp_path) == files


def test_installed_lists_only_what_is_whole(alias: WheelModel, tmp_path: Path) -> None:
    assert store.installed(tmp_path) == []
    path = install(alias, tmp_path)
    assert store.installed(tmp_path) == [store.InstalledModel("tiny", path, 4)]
    path.write_bytes(b"GG")
    assert store.installed(tmp_path) == []


def test_the_cache_folder_comes_from_option_then_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PENSTOCK_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert store.cache_folder() == tmp_path / ".cache" / "penstock"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store.cache_folder() == tmp_path / "xdg" / "penstock"
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "own"))
    assert store.cache_folder() == tmp_path / "own"
    assert store.cache_folder(tmp_path / "option") == tmp_path / "option"


def test_a_local_model_cannot_be_pulled(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ModelNotFound, match="already on this machine"):
        store.pull(str(tmp_path / "a.gguf"))


def test_the_default_model_is_an_alias() -> None:
    assert store.DEFAULT_MODEL in store.ALIASES


# ---------------------------------------------------------------- the hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    with serving() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield server


HUB_FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"[]",
    "model.safetensors": b"w" * 100_000,
    "chat_template.jinja": b"template",
    "pytorch_model.bin": b"pickle",
    "README.md": b"words",
    "onnx/model.safetensors": b"other",
    "consolidated.safetensors": b"other",
}


def fetched(server: FileServer) -> set[str]:
    return {path.partition(f"/resolve/{fake_hub.COMMIT}/")[2] for method, path, _ in server.requests if method == "GET"}


def test_a_hub_model_is_fetched_without_pickles_and_found_again_offline(hub: FileServer, tmp_path: Path) -> None:
    fake_hub.publish(hub, "org/tiny", HUB_FILES)
    told: list[tuple[int, int, str]] = []
    files = store.resolve("org/tiny", cache_dir=tmp_path, progress=lambda *args: told.append(args))
    assert (files.name, files.kind, files.source) == ("org/tiny", "folder", "org/tiny")
    assert files.revision == fake_hub.COMMIT
    assert (files.path / "model.safetensors").read_bytes() == HUB_FILES["model.safetensors"]
    assert fetched(hub) - {""} == {"config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"}
    assert told
    assert told[-1][2] == "org/tiny"
    hub.files.clear()
    assert store.resolve("org/tiny", cache_dir=tmp_path) == files


def test_random_weights_of_a_hub_model_fetch_no_weights(hub: FileServer, tmp_path: Path) -> None:
    fake_hub.publish(hub, "org/tiny", HUB_FILES)
    files = store.resolve("org/tiny", cache_dir=tmp_path, load_format="dummy")
    assert files.load_format == "dummy"
    assert "model.safetensors" not in fetched(hub)


def test_a_revision_is_asked_for_by_name(hub: FileServer, tmp_path: Path) -> None:
    fake_hub.publish(hub, "org/tiny", HUB_FILES, revision="v2")
    assert store.resolve("org/tiny", cache_dir=tmp_path, revision="v2").revision == fake_hub.COMMIT


def test_one_gguf_file_of_a_hub_model_is_fetched_by_its_name(hub: FileServer, tmp_path: Path) -> None:
    fake_hub.publish(hub, "org/tiny", {"tiny.Q4_0.gguf": b"GGUF", "tiny.Q8_0.gguf": b"GGUF8"})
    files = store.resolve("org/tiny/tiny.Q8_0.gguf", cache_dir=tmp_path)
    assert (files.name, files.kind, files.path.read_bytes()) == ("tiny.Q8_0", "gguf", b"GGUF8")
    assert (files.source, files.revision) == ("org/tiny/tiny.Q8_0.gguf", fake_hub.COMMIT)
    assert [item.name for item in store.installed(tmp_path)] == ["org/tiny/tiny.Q8_0.gguf"]


def test_a_hub_model_with_pickled_weights_only_is_refused(hub: FileServer, tmp_path: Path) -> None:
    fake_hub.publish(hub, "org/tiny", {"config.json": b"{}", "tokenizer.json": b"{}", "pytorch_model.bin": b"pickle"})
    with pytest.raises(ModelNotFound, match=r"org/tiny is not usable.*lacks \*\.safetensors"):
        store.resolve("org/tiny", cache_dir=tmp_path)


def test_installed_lists_hub_models_with_their_size(hub: FileServer, tmp_path: Path) -> None:
    fake_hub.publish(hub, "org/tiny", HUB_FILES)
    files = store.resolve("org/tiny", cache_dir=tmp_path)
    assert store.installed(tmp_path) == [store.InstalledModel("org/tiny", files.path, 100_000, "main")]


def test_revisions_of_one_hub_model_are_told_apart_by_what_names_them(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--tiny"
    (repository / "snapshots").mkdir(parents=True)
    for commit in ("aaa", "bbb", "ccc"):
        make_folder(repository / "snapshots" / commit, "config.json", "tokenizer.json", "model.safetensors")
    (repository / "snapshots" / "ccc" / "tiny.gguf").write_bytes(b"GGUF")
    (repository / "refs" / "refs" / "pr").mkdir(parents=True)
    for name, commit in (("main", "bbb"), ("latest", "bbb"), ("refs/pr/1", "ccc")):
        (repository / "refs" / name).write_text(commit)
    assert [(item.name, item.revision) for item in store.installed(tmp_path)] == [
        ("org/tiny", "aaa"),
        ("org/tiny", "main"),
        ("org/tiny", "refs/pr/1"),
        ("org/tiny/tiny.gguf", "refs/pr/1"),
    ]


def test_a_hub_model_whose_weights_were_removed_is_not_listed(hub: FileServer, tmp_path: Path) -> None:
    fake_hub.publish(hub, "org/tiny", HUB_FILES)
    files = store.resolve("org/tiny", cache_dir=tmp_path)
    (files.path / "model.safetensors").unlink()
    (files.path / "model.safetensors").symlink_to(tmp_path / "pruned")
    assert store.installed(tmp_path) == []


def test_a_hub_model_of_which_a_part_is_missing_is_neither_listed_nor_called_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / fake_hub.COMMIT
    snapshot.parent.mkdir(parents=True)
    make_folder(snapshot, "config.json", "tokenizer.json", *shards)
    (snapshot / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict(zip("ab", shards, strict=True))})
    )
    (tmp_path / "hub" / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "hub" / "models--org--tiny" / "refs" / "main").write_text(fake_hub.COMMIT)
    assert store.installed(tmp_path) == [store.InstalledModel("org/tiny", snapshot, 4, "main")]
    (snapshot / shards[1]).unlink()
    assert store.installed(tmp_path) == []
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=f"names {shards[1]}, which is not there"):
        store.pull("org/tiny", cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("status", "code", "complaint"),
    [
        (404, "RepoNotFound", "the hub has no model org/tiny, or it is private"),
        (403, "GatedRepo", "accept its terms.*HF_TOKEN"),
        (404, "RevisionNotFound", "has no branch, tag or commit 'v9'"),
        (401, "", "the hub answered 401 for model org/tiny; it does not know you: check HF_TOKEN"),
        (403, "", "the hub answered 403 for model org/tiny; you may not have it"),
        (404, "", "the hub answered 404 for model org/tiny; it has no such model or file"),
        (429, "", "the hub answered 429 for model org/tiny; .* wait some minutes"),
        (500, "", "the hub answered 500 for model org/tiny; try again later"),
        (503, "", "the hub answered 503 for model org/tiny; try again later"),
    ],
)
def test_the_hub_s_refusals_say_what_to_do(
    hub: FileServer, tmp_path: Path, status: int, code: str, complaint: str
) -> None:
    hub.failure = (status, {"X-Error-Code": code})
    with pytest.raises(ModelError, match=complaint):
        store.resolve("org/tiny", cache_dir=tmp_path, revision="v9")


def test_a_hub_model_without_a_main_branch_says_how_to_name_another(hub: FileServer, tmp_path: Path) -> None:
    hub.failure = (404, {"X-Error-Code": "RevisionNotFound"})
    with pytest.raises(ModelError, match="has no main branch; name another with --revision"):
        store.resolve("org/tiny", cache_dir=tmp_path)


def test_a_file_that_the_hub_does_not_give_is_told_with_its_answer(hub: FileServer, tmp_path: Path) -> None:
    hub.failure = (404, {})
    with pytest.raises(ModelError, match="the hub answered 404 for model org/tiny"):
        store.resolve("org/tiny/model.gguf", cache_dir=tmp_path)


@pytest.mark.parametrize("model", ["org/tiny", "org/tiny/model.gguf"])
def test_without_a_network_a_hub_model_that_is_not_here_is_an_error_at_once(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits to try again"))
    with pytest.raises(ModelError, match="not here yet, and the hub cannot be reached"):
        store.resolve(model, cache_dir=tmp_path)
    assert logging.getLogger("huggingface_hub").handlers == []  # or its lines would be there twice


def test_without_a_network_a_gguf_file_that_was_fetched_before_is_found(
    hub: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_hub.publish(hub, "org/tiny", {"model.gguf": b"GGUF"})
    files = store.resolve("org/tiny/model.gguf", cache_dir=tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert store.resolve("org/tiny/model.gguf", cache_dir=tmp_path) == files
