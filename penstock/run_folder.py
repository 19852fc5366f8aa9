"""The private folder of one running server or gateway: its sockets and counts, which go when it goes.

Whoever was killed leaves its folder behind, and the next to start takes that away. A lock that the kernel lets go of
with its owner tells the living from the dead. Knows nothing of what is in the folder.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import ConfigError

PREFIX = "penstock-"
MAX_SOCKET_PATH_BYTES = 103  # which every system takes

_LOCK_NAME = "owner.lock"


def temporary_folder() -> Path:
    """Return the folder for what need not stay. Raises ConfigError where no file can be written in any."""
    try:
        return Path(tempfile.gettempdir())
    except OSError as error:
        right = f"no file can be written ({error.strerror}); make room there, or name a folder that you may write"
        raise ConfigError("TMPDIR", os.environ.get("TMPDIR", "default"), right) from error


@contextmanager
def run_folder(kind: str = "") -> Iterator[Path]:
    """Make a folder that only this user may enter, and take it away at the end, with those of the dead before it."""
    parent = temporary_folder()
    _remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX + kind, dir=parent))  # mode 0700: only we may connect
    try:
        # The lock is there before its name is: a name without a lock means that its owner is dead.
        with (folder / f"{_LOCK_NAME}.new").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            Path(lock.name).rename(folder / _LOCK_NAME)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def socket_path(folder: Path, name: str) -> Path:
    """Return where a socket of a run folder is. Raises ConfigError where its path is too long for one."""
    path = folder / name
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        right = "a Unix socket there would have too long a name; name a folder of a shorter path"
        raise ConfigError("TMPDIR", str(folder.parent), right)
    return path


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of this user whose owners are dead."""
    for folder in parent.glob(f"{PREFIX}*"):
        # Gone meanwhile, not ours, or its owner lives: nothing to do.
        with contextlib.suppress(OSError):
            if _is_private(folder):
                with (folder / _LOCK_NAME).open("rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)


def _is_private(folder: Path) -> bool:
    """Whether it is a folder, not a link to one, that nobody but this user can have filled."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
