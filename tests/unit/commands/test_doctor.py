"""Each check of the doctor finds what is wrong and says what to do."""

import errno
import json
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import machine
from penstock.commands import doctor
from penstock.commands.doctor import Finding, Status
from penstock.config import Options
from penstock.models import store

GIB = 2**30


def test_this_python_and_this_torch_are_fit() -> None:
    assert doctor.check_python(Options()).status is Status.OK
    assert doctor.check_torch(Options()).status is Status.OK


@pytest.mark.parametrize(("version", "status"), [("2.10.2", "fail"), ("2.11.0+cpu", "ok"), ("2.14.0", "fail")])
def test_a_torch_outside_the_supported_range_fails(monkeypatch: pytest.MonkeyPatch, version: str, status: str) -> None:
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: version)
    assert doctor.check_torch(Options()).status == status


def test_a_missing_cuda_device_fails_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert doctor.check_device(Options()).status is Status.OK
    finding = doctor.check_device(Options(device="cuda"))
    assert finding.status is Status.FAIL
    assert "--device cpu" in finding.advice


@pytest.mark.parametrize(
    ("usable", "status"), [(GIB // 2, "fail"), (3 * GIB // 2, "warn"), (4 * GIB, "ok"), (None, "warn")]
)
def test_memory_is_judged_by_what_is_usable(monkeypatch: pytest.MonkeyPatch, usable: int | None, status: str) -> None:
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(None, usable))
    assert doctor.check_memory(Options()).status == status


def test_a_containers_limit_counts_and_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(64 * GIB, 32 * GIB, GIB, GIB // 2))
    finding = doctor.check_memory(Options())
    assert finding.status is Status.FAIL
    assert "container limit 1.0 GiB" in finding.found


@pytest.mark.parametrize(
    ("features", "status"), [(("asimddp",), "ok"), ((), "warn"), (None, "warn"), (("i8mm",), "warn")]
)
def test_an_arm_cpu_without_dot_products_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, features: tuple[str, ...] | None, status: str
) -> None:
    monkeypatch.setattr(machine, "is_arm", lambda: True)
    monkeypatch.setattr(machine, "is_x86", lambda: False)
    monkeypatch.setattr(machine, "cpu_features", lambda: features)
    assert doctor.check_cpu_features(Options()).status == status


def test_a_cache_folder_that_is_not_there_yet_is_fit(tmp_path: Path) -> None:
    assert doctor.check_cache_folder(Options(cache_dir=str(tmp_path / "a" / "b"))).status is Status.OK
    assert not (tmp_path / "a").exists()


def test_a_cache_folder_that_cannot_be_written_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    finding = doctor.check_cache_folder(Options(cache_dir=str(tmp_path)))
    assert finding.status is Status.FAIL
    assert "Permission denied" in finding.found
    assert "--cache-dir" in finding.advice


@pytest.mark.parametrize("check", [doctor.check_cache_folder, doctor.check_default_model])
def test_a_cache_folder_whose_name_no_folder_can_have_is_a_finding(
    check: Callable[[Options], Finding], tmp_path: Path
) -> None:
    finding = check(Options(cache_dir=str(tmp_path / ("a" * 300))))
    assert finding.status is Status.FAIL
    assert "File name too long" in finding.found


def test_a_store_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    finding = doctor.check_store(Options())
    assert finding.status is Status.WARN
    assert finding.found.startswith("/proc/none/penstock/penstock.db cannot be written")
    assert "--store" in finding.advice
    for location in (str(tmp_path / "a" / "b.db"), "none", "postgresql://me:secret@host/db"):
        fit = doctor.check_store(Options(store=location))
        assert fit.status is Status.OK and "secret" not in fit.found
    assert not (tmp_path / "a").exists()


def test_a_default_model_that_is_not_fetched_is_a_warning(tmp_path: Path) -> None:
    finding = doctor.check_default_model(Options(cache_dir=str(tmp_path)))
    assert finding.status is Status.WARN
    assert "penstock pull" in finding.advice


def test_a_damaged_default_model_fails(tmp_path: Path) -> None:
    wheel = store.ALIASES[store.DEFAULT_MODEL]
    path = tmp_path / "models" / store.DEFAULT_MODEL / wheel.file_name
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(wheel.file_bytes)
    finding = doctor.check_default_model(Options(cache_dir=str(tmp_path)))
    assert finding.status is Status.FAIL
    assert "damaged" in finding.found


def test_a_port_in_use_is_a_warning_and_a_free_one_is_fit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert doctor.check_port(Options(port=port)).status is Status.WARN
    assert doctor.check_port(Options(port=0)).status is Status.OK


@pytest.mark.parametrize("host", ["nope.invalid", "192.0.2.1"])
def test_a_host_that_is_not_this_machine_s_fails_by_name(host: str) -> None:
    finding = doctor.check_port(Options(host=host))
    assert finding.status is Status.FAIL
    assert finding.found.startswith(f"{host} is not of this machine")
    assert "--host" in finding.advice


@pytest.mark.parametrize(
    ("limit", "status"), [(64, "fail"), (1024, "warn"), (65536, "ok"), (resource.RLIM_INFINITY, "ok")]
)
def test_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch, limit: int, status: str) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (limit, limit))
    assert doctor.check_open_files(Options()).status == status


def test_a_temporary_folder_with_too_long_a_name_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("x" * 90)
    folder.mkdir()
    monkeypatch.setattr(doctor.tempfile, "gettempdir", lambda: str(folder))
    finding = doctor.check_sockets(Options())
    assert finding.status is Status.FAIL
    assert "TMPDIR" in finding.advice


def test_no_temporary_folder_to_write_in_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(doctor.tempfile, "gettempdir", find_none)
    finding = doctor.check_sockets(Options())
    assert finding.status is Status.FAIL
    assert "/tmp" in finding.found and "TMPDIR" in finding.advice


def pip_says(monkeypatch: pytest.MonkeyPatch, output: str, status: int = 0) -> Finding:
    result = subprocess.CompletedProcess(["pip"], status, stdout=output, stderr="")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: result)
    return doctor.check_package_index(Options())


def test_the_package_index_is_shown_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = pip_says(monkeypatch, "global.index-url='https://me:secret@index.example/simple'\n")
    assert finding == Finding("package index", Status.OK, "https://index.example/simple")


def test_pip_without_an_index_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pip_says(monkeypatch, "global.no-index='true'\n").status is Status.WARN


def test_a_pip_that_does_not_run_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pip_says(monkeypatch, "", status=1).status is Status.WARN


def test_every_finding_that_is_not_ok_says_what_to_do(tmp_path: Path) -> None:
    for finding in doctor.examine(Options(cache_dir=str(tmp_path))):
        assert bool(finding.advice) == (finding.status is not Status.OK), finding


@pytest.mark.parametrize(("statuses", "expected"), [(["ok", "warn"], 0), (["ok", "fail"], 1)])
def test_only_a_failure_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], statuses: list[str], expected: int
) -> None:
    checks = tuple(
        (lambda options, status=status: Finding("check", Status(status), "found", "do this")) for status in statuses
    )
    monkeypatch.setattr(doctor, "CHECKS", checks)
    assert doctor.run(Options(), as_json=False) == expected
    shown = capsys.readouterr().out
    assert all(status in shown for status in statuses)
    assert "→ do this" in shown


def test_json_has_one_object_per_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (doctor.check_python,))
    doctor.run(Options(), as_json=True)
    (finding,) = json.loads(capsys.readouterr().out)
    assert finding["check"] == "python"
    assert finding["status"] == "ok"
    assert sys.executable in finding["found"]
