"""`scripts/gpu_check` refuses in a sentence what it cannot do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def check(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "gpu_check"), *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("option", ["--parts", "--models", "--workloads"])
def test_an_unknown_name_is_refused_with_the_known_ones(option: str, tmp_path: Path) -> None:
    done = check(option, "nosuch", folder=tmp_path)
    assert done.returncode == 2
    assert f"{option}: nosuch is none of " in done.stderr


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--draws", "0", "--draws: 0 is less than 1"),
        ("--draws", "-1", "--draws: -1 is less than 1"),
        ("--parts", "", "--parts: give some of tests, "),
        ("--parts", ",", "--parts: give some of tests, "),
    ],
)
def test_what_would_run_nothing_is_refused(option: str, value: str, sentence: str, tmp_path: Path) -> None:
    done = check(f"{option}={value}", folder=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr


def test_without_a_device_nothing_is_timed(tmp_path: Path) -> None:
    done = check("--parts", "offline", "--workloads", "decode1,rate10", "--out", "results", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("torch sees no CUDA device here")
    assert not list(tmp_path.iterdir())
