"""A running server's folder goes with it; one that was killed is cleared away by the next."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.run_folder import run_folder, socket_path

KILLED = """
import os, signal
from penstock.run_folder import run_folder
with run_folder("gateway-") as folder:
    (folder / "admin.sock").touch()
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_only_its_owner_may_enter_a_folder_and_it_goes_at_the_end():
    with run_folder("gateway-") as folder:
        assert folder.name.startswith("penstock-gateway-")
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "metrics").mkdir()
    assert not folder.exists()


def test_the_folder_of_one_that_was_killed_is_removed_by_the_next():
    died = subprocess.run([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    left = Path(died.stdout.strip())
    assert died.returncode == -signal.SIGKILL and left.is_dir()
    with run_folder():
        assert not left.exists()


def test_the_folder_of_one_that_lives_is_left_alone():
    with run_folder() as first, run_folder() as second:
        assert first.is_dir() and second.is_dir()


def test_what_is_not_known_to_be_abandoned_is_left_alone(temporary):
    unlocked, shared, real = temporary / "penstock-unlocked", temporary / "penstock-shared", temporary / "elsewhere"
    for folder in (unlocked, shared, real):
        folder.mkdir(mode=0o700)
    for folder in (shared, real):
        (folder / "owner.lock").touch()
    os.chmod(shared, 0o777)
    link = temporary / "penstock-link"
    link.symlink_to(real)
    with run_folder():
        assert unlocked.is_dir() and shared.is_dir() and link.is_dir() and (real / "owner.lock").is_file()


def test_where_no_file_can_be_written_a_sentence_names_the_folders_and_the_variable(monkeypatch):
    def find_none():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", find_none)
    with pytest.raises(ConfigError, match=r"TMPDIR: .*'/tmp', '/var/tmp'.*name a folder"), run_folder():
        pass


def test_too_long_a_path_for_a_socket_is_told_with_the_variable():
    folder = Path("/", "x" * 80, "penstock-a")
    assert socket_path(folder, "b.sock") == folder / "b.sock"
    with pytest.raises(ConfigError, match=r"TMPDIR: '/x+' .* a shorter path"):
        socket_path(folder, "engine.sock")
