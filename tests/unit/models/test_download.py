"""Downloads that go on where they ended and never leave a damaged file behind."""

import errno
import hashlib
import multiprocessing
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.errors import ModelError
from penstock.models.download import DownloadInterrupted, exclusive, fetch, part_of, require_space, storing_in
from tests.fakes.file_server import FileServer, serving

CONTENT = bytes(range(256)) * 4000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving() as running:
        running.files["/file"] = CONTENT
        yield running


def download(server: FileServer, target: Path, **options: object) -> list[tuple[int, int, str]]:
    told: list[tuple[int, int, str]] = []
    wanted = {"num_bytes": len(CONTENT), "sha256": DIGEST, **options}
    fetch(f"{server.url}/file", target, progress=lambda *args: told.append(args), **wanted)  # type: ignore[arg-type]
    return told


def test_a_file_arrives_whole_and_progress_ends_at_the_total(server: FileServer, tmp_path: Path) -> None:
    told = download(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert told[-1] == (len(CONTENT), len(CONTENT), "file")
    assert not part_of(tmp_path / "file").exists()


def test_a_broken_connection_goes_on_where_it_ended(server: FileServer, tmp_path: Path) -> None:
    server.cut_after = 300_000
    download(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert [wanted for _, _, wanted in server.requests] == [None, "bytes=300000-"]


def test_a_later_try_goes_on_from_the_part_that_was_kept(server: FileServer, tmp_path: Path) -> None:
    part_of(tmp_path / "file").write_bytes(CONTENT[:1000])
    download(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.requests == [("GET", "/file", "bytes=1000-")]


def test_a_part_that_was_whole_already_needs_no_byte_more(server: FileServer, tmp_path: Path) -> None:
    part_of(tmp_path / "file").write_bytes(CONTENT)
    assert download(server, tmp_path / "file") == []
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_server_without_ranges_starts_over(server: FileServer, tmp_path: Path) -> None:
    server.ranges = False
    part_of(tmp_path / "file").write_bytes(b"x" * 1000)
    download(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_damaged_download_is_deleted_and_said_so(server: FileServer, tmp_path: Path) -> None:
    server.files["/file"] = CONTENT[:-1] + b"\0"
    with pytest.raises(ModelError, match=r"is damaged.*it was deleted"):
        download(server, tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_another_file_is_deleted_when_the_hash_tells(server: FileServer, tmp_path: Path) -> None:
    part_of(tmp_path / "file").write_bytes(b"x" * 1000)
    with pytest.raises(ModelError, match="is damaged"):
        download(server, tmp_path / "file")
    download(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_server_that_sends_without_end_is_not_followed(server: FileServer, tmp_path: Path) -> None:
    server.files["/file"] = CONTENT + b"more" * 1000
    download(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_network_that_is_gone_keeps_the_part(server: FileServer, tmp_path: Path) -> None:
    part_of(tmp_path / "file").write_bytes(CONTENT[:1000])
    server.files.clear()
    with pytest.raises(DownloadInterrupted, match="404"):
        download(server, tmp_path / "file")
    assert part_of(tmp_path / "file").read_bytes() == CONTENT[:1000]


def test_a_host_that_cannot_be_reached_is_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(DownloadInterrupted, match="cannot be reached"):
        fetch("http://127.0.0.1:9/file", tmp_path / "file", num_bytes=1, sha256=DIGEST)


def test_certificates_come_from_the_environment(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no.pem").write_text("no certificate")
    monkeypatch.setenv("PIP_CERT", str(tmp_path / "no.pem"))
    with pytest.raises(ModelError, match=r"PIP_CERT.*no\.pem"):
        download(server, tmp_path / "file")


def test_a_disk_without_space_is_refused_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5_000_000))
    require_space(tmp_path, 4_000_000)
    with pytest.raises(ModelError, match="has 5 MB free, but 6 MB are needed"):
        require_space(tmp_path, 6_000_000)


@pytest.mark.parametrize(
    ("number", "complaint"),
    [
        (errno.ENOSPC, "is full"),
        (errno.EROFS, "no folder to write to"),
        (errno.EACCES, "allow it"),
        (errno.ENOENT, "no folder"),
    ],
)
def test_failures_to_write_say_what_to_do(tmp_path: Path, number: int, complaint: str) -> None:
    with pytest.raises(ModelError, match=f"{complaint}.*PENSTOCK_CACHE_DIR"), storing_in(tmp_path):
        raise OSError(number, "reason")


def hold(lock: Path, marker: Path) -> None:
    with exclusive(lock):
        marker.touch(exist_ok=False)  # fails, and so does the process, where another one is here
        time.sleep(0.1)
        marker.unlink()


def test_only_one_process_holds_the_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=hold, args=(tmp_path / "lock", tmp_path / "marker")) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
