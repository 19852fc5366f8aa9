"""`penstock doctor`: is this computer fit to serve, and if not, what to do.

Every check looks, changes nothing that stays, and gives one finding. A warning is something that works less well than
it could; a failure is something that will not work.
"""

import dataclasses
import enum
import errno
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from penstock import machine
from penstock.commands.tables import print_table
from penstock.config import Options
from penstock.errors import ModelError
from penstock.run_folder import MAX_SOCKET_PATH_BYTES, PREFIX
from penstock.store.location import NO_STORE, default_location, shown

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 13)
MIB, GIB = 2**20, 2**30
# The default model as dense float32 takes 0.5 GiB; the processes around it about as much again.
LEAST_MEMORY_BYTES = 1 * GIB
GOOD_MEMORY_BYTES = 2 * GIB
# A fetched wheel and the model taken out of it lie side by side for a moment.
FETCH_BYTES = 300 * MIB
LEAST_OPEN_FILES, GOOD_OPEN_FILES = 256, 4096
# How much of a socket's path Penstock adds to the temporary folder's.
SOCKET_NAME_BYTES = 40


class Status(enum.StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found; `advice` says what to do unless the status is ok."""

    check: str
    status: Status
    found: str
    advice: str = ""


STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red"}


def check_python(options: Options) -> Finding:
    found = f"{platform.python_version()} ({platform.machine()}, {sys.executable})"
    if sys.version_info < OLDEST_PYTHON:
        return Finding("python", Status.FAIL, found, "install Python 3.11 or newer")
    return Finding("python", Status.OK, found)


def check_torch(options: Options) -> Finding:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Finding("torch", Status.FAIL, "not installed", "run `pip install torch==2.13.0`")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not OLDEST_TORCH <= numbers <= NEWEST_TORCH:
        return Finding("torch", Status.FAIL, version, "install a torch from 2.11 to 2.13: `pip install torch==2.13.0`")
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("torch", Status.FAIL, f"{version}, but it does not load ({error})", "install torch again")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Finding("torch", Status.OK, f"{version} ({build})")


def check_device(options: Options) -> Finding:
    cores = f"{machine.usable_cores():g} CPU cores"
    try:
        import torch
    except (ImportError, OSError):
        return Finding("device", Status.WARN, cores, "torch must load before a GPU can be looked for")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        shown = ", ".join(f"{item.name} ({item.total_memory / GIB:.0f} GiB)" for item in names)
        return Finding("device", Status.OK, f"{shown}; {cores}")
    if options.device == "cuda":
        return Finding("device", Status.FAIL, f"no CUDA device; {cores}", "use --device cpu, or install a driver")
    if shutil.which("nvidia-smi") and torch.version.cuda is None:
        return Finding("device", Status.WARN, f"{cores}; torch cannot use the GPU", "install torch's CUDA build")
    return Finding("device", Status.OK, cores)


def check_cpu_features(options: Options) -> Finding:
    features = machine.cpu_features()
    if features is None:
        return Finding("cpu features", Status.WARN, "the system does not list them", "speed may differ from the docs")
    found = ", ".join(features) or "none of those that matter"
    if machine.is_arm() and "asimddp" not in features:
        return Finding("cpu features", Status.WARN, found, "no dot products (asimddp): 4-bit models run dense and slow")
    if machine.is_x86() and "avx2" not in features:
        return Finding("cpu features", Status.WARN, found, "no AVX2: tensor work will be slow")
    return Finding("cpu features", Status.OK, found)


def check_memory(options: Options) -> Finding:
    memory = machine.memory()
    if memory.usable is None:
        return Finding("memory", Status.WARN, "the system does not tell", "the default model needs about 1 GiB")
    found = f"{memory.usable / GIB:.1f} GiB usable"
    if memory.total is not None:
        found += f" of {memory.total / GIB:.1f} GiB"
    found += f", container limit {memory.limit / GIB:.1f} GiB" if memory.limit is not None else ", no container limit"
    if memory.usable < LEAST_MEMORY_BYTES:
        return Finding("memory", Status.FAIL, found, "free memory: the default model needs about 1 GiB")
    if memory.usable < GOOD_MEMORY_BYTES:
        return Finding("memory", Status.WARN, found, "enough for the default model, little room for the KV cache")
    return Finding("memory", Status.OK, found)


def check_cache_folder(options: Options) -> Finding:
    from penstock.models import store

    folder = store.cache_folder(options.cache_dir)
    try:
        existing = _existing(folder)
        _try_to_write(existing)
    except OSError as error:
        advice = "name a writable folder with --cache-dir or PENSTOCK_CACHE_DIR"
        return Finding("cache folder", Status.FAIL, f"{folder} cannot be written ({error.strerror})", advice)
    free = shutil.disk_usage(existing).free
    found = f"{folder}, {free / GIB:.1f} GiB free"
    if free < FETCH_BYTES:
        return Finding("cache folder", Status.WARN, found, f"a fetch needs {FETCH_BYTES // MIB} MiB: make room")
    return Finding("cache folder", Status.OK, found)


def check_store(options: Options) -> Finding:
    """Keys, limits, usage and batches are in it. Without one the server says so, and serves."""
    location = options.store or default_location()
    if location == NO_STORE or "://" in location:
        return Finding("store", Status.OK, shown(location))
    file = Path(location).expanduser().absolute()
    try:
        _try_to_write(_existing(file.parent))
    except OSError as error:
        advice = "name a path that can be written with --store, or else no usage is kept and no keys are"
        return Finding("store", Status.WARN, f"{file} cannot be written ({error.strerror})", advice)
    return Finding("store", Status.OK, str(file))


def _existing(folder: Path) -> Path:
    """Return the part of a folder's path that is there."""
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def _try_to_write(folder: Path) -> None:
    """Raise OSError where no file can be made."""
    with tempfile.TemporaryFile(dir=folder):
        pass


def check_default_model(options: Options) -> Finding:
    """The file was verified when it was fetched; here it is read again, in case the disk or a person changed it."""
    from penstock.models import store

    name = store.DEFAULT_MODEL
    try:
        path = next((item.path for item in store.installed(options.cache_dir) if item.name == name), None)
    except ModelError as error:
        return Finding("default model", Status.FAIL, str(error), "see the cache folder above")
    if path is None:
        advice = "`penstock serve` will fetch it; `penstock pull` does so now"
        return Finding("default model", Status.WARN, f"{name} is not fetched", advice)
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        advice = "make it readable, or remove it and run `penstock pull`"
        return Finding("default model", Status.FAIL, f"{path} cannot be read ({error.strerror})", advice)
    if digest != store.ALIASES[name].file_sha256:
        advice = f"`penstock pull {name}` fetches it again"
        return Finding("default model", Status.FAIL, f"{path} is damaged (its SHA-256 is {digest})", advice)
    return Finding("default model", Status.OK, f"{name}, SHA-256 {digest[:12]}… as published")


def check_port(options: Options) -> Finding:
    where = f"{options.host}:{options.port}"
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As the server does: a port whose last connections still linger is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((options.host, options.port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or "no such address"
            if isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
                advice = "give an address of this machine with --host"
                return Finding("port", Status.FAIL, f"{options.host} is not of this machine ({reason})", advice)
            advice = "a server may be running already; serve on another with --port"
            return Finding("port", Status.WARN, f"{where} cannot be used ({reason})", advice)
    return Finding("port", Status.OK, f"{where} is free")


def check_open_files(options: Options) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return Finding("open files", Status.OK, "no limit")
    found = f"{soft} per process"
    advice = f"each open stream takes one: raise it with `ulimit -n {GOOD_OPEN_FILES}`"
    if soft < LEAST_OPEN_FILES:
        return Finding("open files", Status.FAIL, found, advice)
    if soft < GOOD_OPEN_FILES:
        return Finding("open files", Status.WARN, found, advice)
    return Finding("open files", Status.OK, found)


def check_sockets(options: Options) -> Finding:
    """API workers and the engine meet at a Unix socket in the temporary folder."""
    writable = "set TMPDIR to a local folder that you may write"
    try:
        base = tempfile.gettempdir()
    except OSError as error:
        return Finding("sockets", Status.FAIL, f"{error.strerror}", writable)
    if len(os.fsencode(base)) + SOCKET_NAME_BYTES > MAX_SOCKET_PATH_BYTES:
        advice = "a Unix socket there would have too long a name: set TMPDIR to a shorter path"
        return Finding("sockets", Status.FAIL, base, advice)
    try:
        with tempfile.TemporaryDirectory(prefix=PREFIX) as folder, socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(Path(folder) / "probe"))
    except OSError as error:
        return Finding("sockets", Status.FAIL, f"no Unix socket can be made in {base} ({error.strerror})", writable)
    return Finding("sockets", Status.OK, f"Unix sockets work in {base}")


def check_package_index(options: Options) -> Finding:
    """The default model comes out of a wheel, so pip must know an index."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        result = None
    if result is None or result.returncode != 0:
        advice = "the default model is fetched with pip: run `python -m ensurepip`, or serve a local file"
        return Finding("package index", Status.WARN, "pip does not run", advice)
    settings = dict(re.findall(r"^([\w.:-]+)='(.*)'$", result.stdout, re.MULTILINE))
    indexes = [_without_credentials(value) for name, value in settings.items() if name.endswith(".index-url")]
    offline = any(name.endswith(".no-index") and value not in ("0", "false") for name, value in settings.items())
    if offline:
        return Finding("package index", Status.WARN, "pip is told to use none", "unset no-index to fetch the model")
    return Finding("package index", Status.OK, indexes[-1] if indexes else "pip's default")


def _without_credentials(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//", url)


CHECKS: tuple[Callable[[Options], Finding], ...] = (
    check_python,
    check_torch,
    check_device,
    check_cpu_features,
    check_memory,
    check_cache_folder,
    check_store,
    check_default_model,
    check_package_index,
    check_port,
    check_open_files,
    check_sockets,
)


def examine(options: Options) -> list[Finding]:
    return [check(options) for check in CHECKS]


def exit_status(findings: list[Finding]) -> int:
    return 1 if any(finding.status is Status.FAIL for finding in findings) else 0


def run(options: Options, *, as_json: bool) -> int:
    findings = examine(options)
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column()
        table.add_column()
        table.add_column(overflow="fold")
        for finding in findings:
            found = Text(finding.found)
            if finding.status is not Status.OK:
                found.append(f"\n→ {finding.advice}", style=STYLES[finding.status])
            table.add_row(Text(finding.status, style=STYLES[finding.status]), finding.check, found)
        print_table(table)
    return exit_status(findings)
