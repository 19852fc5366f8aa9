"""Files fetched over HTTP so that a broken connection, a full disk or a second process does no harm.

A download grows in a `.part` file that survives failures, is verified by its SHA-256 and only then takes its name.
Knows nothing of models. No torch.
"""

import errno
import fcntl
import hashlib
import http.client
import os
import shutil
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import ModelError

Progress = Callable[[int, int, str], None]  # (done bytes, total bytes, what)

_CHUNK_BYTES = 1 << 20
_TIMEOUT_SECONDS = 30.0
_MAX_FAILURES = 3  # in a row, without a new byte
_CERTIFICATE_VARIABLES = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")


_NO_FOLDER = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP
)  # fmt: skip


class DownloadInterrupted(Exception):
    """The network or the server failed; what came so far is kept, and another try goes on from there."""


def fetch(url: str, target: Path, *, num_bytes: int, sha256: str, progress: Progress | None = None) -> None:
    """Download `url`, which has `num_bytes`, to `target`, going on where an earlier try ended.

    Raises DownloadInterrupted when the network gives up, ModelError when the content is not what it should be.
    """
    part = part_of(target)
    failures = 0
    while True:
        before = _size(part)
        try:
            _transfer(url, part, num_bytes, target.name, progress)
            break
        except DownloadInterrupted:
            failures = 1 if _size(part) > before else failures + 1
            if failures == _MAX_FAILURES:
                raise
            time.sleep(0.5 * failures)
    verify(part, sha256, what=f"the download of {target.name}")
    part.replace(target)


def part_of(target: Path) -> Path:
    """Where a file grows before it is whole."""
    return target.with_name(target.name + ".part")


def verify(path: Path, sha256: str, *, what: str) -> None:
    """Delete the file and raise ModelError unless its SHA-256 is the one given."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        path.unlink()
        raise ModelError(
            f"{what} is damaged: its SHA-256 is {found}, not {sha256}; it was deleted, so try again", file=str(path)
        )


@contextmanager
def exclusive(lock: Path) -> Iterator[None]:
    """Hold a lock between processes; it ends with the process at the latest."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def storing_in(folder: Path) -> Iterator[None]:
    """Turn failures to read and write below `folder` into errors that say what to do."""
    elsewhere = "or choose another folder with --cache-dir or PENSTOCK_CACHE_DIR"
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ModelError(f"the disk of {folder} is full; free some space {elsewhere}") from error
        if error.errno in _NO_FOLDER:
            raise ModelError(f"{folder} is no folder to write to ({error.strerror}); allow it {elsewhere}") from error
        raise


def require_space(folder: Path, num_bytes: int) -> None:
    """Raise before a download starts that cannot end."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ModelError(
            f"the disk of {folder} has {free / 1e6:.0f} MB free, but {num_bytes / 1e6:.0f} MB are needed; "
            "free some space or choose another folder with --cache-dir or PENSTOCK_CACHE_DIR"
        )


def _transfer(url: str, part: Path, num_bytes: int, name: str, progress: Progress | None) -> None:
    """Append what is missing to the part, and no byte more than it should have."""
    start = _size(part)
    response = _open(url, start)
    if response is None:
        # The server has nothing after what we have: the part is whole, or not of this file. The hash tells.
        return
    with response:
        resumed = response.status == http.HTTPStatus.PARTIAL_CONTENT
        done = start if resumed else 0
        with part.open("ab" if resumed else "wb") as file:
            while chunk := _read(response, num_bytes - done):
                file.write(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done, num_bytes, name)
    if done < num_bytes:
        raise DownloadInterrupted(f"the connection ended after {done} of {num_bytes} bytes")


def _open(url: str, start: int) -> http.client.HTTPResponse | None:
    """Ask for the bytes from `start` on; None when the server says that there are none."""
    request = urllib.request.Request(url, headers={"Accept-Encoding": "identity", "User-Agent": "penstock"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    # Proxies come from the environment, as everywhere.
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=_tls_context()))
    try:
        response: http.client.HTTPResponse = opener.open(request, timeout=_TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return None
        raise DownloadInterrupted(f"the server answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise DownloadInterrupted(f"the server cannot be reached ({error})") from error
    if response.status == http.HTTPStatus.PARTIAL_CONTENT and _range_start(response) != start:
        response.close()
        raise DownloadInterrupted("the server sent another range than the one asked for")
    return response


def _read(response: http.client.HTTPResponse, max_bytes: int) -> bytes:
    try:
        return response.read(min(max_bytes, _CHUNK_BYTES))
    except (OSError, http.client.HTTPException) as error:
        raise DownloadInterrupted(f"the connection broke ({error})") from error


def _tls_context() -> ssl.SSLContext:
    """Trust what the user's other tools are told to trust."""
    variable = next((name for name in _CERTIFICATE_VARIABLES if os.environ.get(name)), None)
    if variable is None:
        return ssl.create_default_context()
    bundle = os.environ[variable]
    try:
        if Path(bundle).is_dir():
            return ssl.create_default_context(capath=bundle)
        return ssl.create_default_context(cafile=bundle)
    except OSError as error:
        raise ModelError(f"{variable} names {bundle}, which holds no usable certificates ({error.strerror})") from error


def _range_start(response: http.client.HTTPResponse) -> int | None:
    first = (response.getheader("Content-Range") or "").removeprefix("bytes ").partition("-")[0]
    return int(first) if first.isdecimal() else None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
