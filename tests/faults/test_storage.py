"""Disks that are full or closed to us while a model is fetched: a sentence that helps, and nothing to clean up."""

import hashlib
import subprocess
import sys

from tests.fakes.file_server import serving

CONTENT = bytes(range(256)) * 8000
LIMIT = 1_000_000

# A limit on the size of files is what a full disk looks like to a program, wherever the test runs.
FETCH = """
import pathlib, resource, sys
from penstock.errors import ModelError
from penstock.models.download import fetch, storing_in
url, target, size, digest, limit = sys.argv[1:]
if int(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
try:
    with storing_in(pathlib.Path(target).parent):
        fetch(url, pathlib.Path(target), num_bytes=int(size), sha256=digest)
except ModelError as error:
    sys.exit(str(error))
"""


def fetch(url, target, limit):
    digest = hashlib.sha256(CONTENT).hexdigest()
    command = [sys.executable, "-c", FETCH, url, str(target), str(len(CONTENT)), digest, str(limit)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_full_disk_is_told_and_the_next_try_goes_on_where_it_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    target = tmp_path / "model.gguf"
    with serving() as server:
        server.files["/model"] = CONTENT
        full = fetch(f"{server.url}/model", target, LIMIT)
        assert full.returncode == 1
        assert "is full; free some space or choose another folder" in full.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["model.gguf.part"], "nothing looks like a model"
        again = fetch(f"{server.url}/model", target, 0)
        assert again.returncode == 0, again.stderr
        assert server.requests[-1][2] == f"bytes={LIMIT}-"
    assert target.read_bytes() == CONTENT
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_closed_to_us_is_named_before_anything_is_fetched():
    # A file system that nobody may write to, not even root.
    command = [sys.executable, "-m", "penstock", "pull", "smollm2-135m", "--cache-dir", "/proc/penstock"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    told = " ".join((result.stdout + result.stderr).split())
    assert "/proc/penstock" in told
    assert "is no folder to write to" in told
    assert "--cache-dir" in told
    assert "Traceback" not in told
