"""Facts about the computer are read from the system's files, and absent files are absent facts."""

import os
from pathlib import Path

import pytest

from penstock import machine

GIB = 2**30


class Files:
    """A made-up root folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, **files: str) -> None:
        """Write files whose names have __ for the folder separator and DOT for a dot."""
        for name, content in files.items():
            path = self.root / name.replace("__", "/").replace("DOT", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    made = Files(tmp_path)
    made.write(proc__meminfo=f"MemTotal:       {8 * 2**20} kB\nMemFree: 1 kB\nMemAvailable:   {6 * 2**20} kB\n")
    return made


def test_without_a_container_the_available_memory_is_usable(files: Files) -> None:
    found = machine.memory(files.root)
    assert (found.total, found.available, found.limit, found.usable) == (8 * GIB, 6 * GIB, None, 6 * GIB)


def test_a_container_limit_cuts_what_is_usable_and_file_cache_does_not_count(files: Files) -> None:
    files.write(
        proc__self__cgroup="0::/box\n",
        sys__fs__cgroup__box__memoryDOTmax=str(2 * GIB),
        sys__fs__cgroup__box__memoryDOTcurrent=str(GIB),
        sys__fs__cgroup__box__memoryDOTstat=f"anon 5\ninactive_file {GIB // 2}\n",
    )
    found = machine.memory(files.root)
    assert found.limit == 2 * GIB
    assert found.usable == 2 * GIB - GIB // 2


def test_the_first_versions_control_groups_are_read_too(files: Files) -> None:
    files.write(
        proc__self__cgroup="4:memory:/box\n1:cpu,cpuacct:/box\n",
        sys__fs__cgroup__memory__box__memoryDOTlimit_in_bytes=str(3 * GIB),
        sys__fs__cgroup__memory__box__memoryDOTusage_in_bytes=str(GIB),
    )
    assert machine.memory(files.root).usable == 2 * GIB


def test_a_limit_beyond_the_machine_is_no_limit(files: Files) -> None:
    files.write(proc__self__cgroup="0::/\n", sys__fs__cgroup__memoryDOTmax="9223372036854771712")
    assert machine.memory(files.root).limit is None


def test_the_word_max_is_no_limit(files: Files) -> None:
    files.write(proc__self__cgroup="0::/\n", sys__fs__cgroup__memoryDOTmax="max\n")
    assert machine.memory(files.root).limit is None


def test_a_system_that_tells_nothing_gives_no_guess(tmp_path: Path) -> None:
    assert machine.memory(tmp_path).usable is None
    assert machine.cpu_features(tmp_path) is None


def test_a_cpu_quota_cuts_the_cores(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.write(proc__self__cgroup="0::/box\n", sys__fs__cgroup__box__cpuDOTmax="50000 100000\n")
    assert machine.usable_cores(tmp_path) == 0.5


def test_without_a_quota_all_cores_of_the_process_are_usable(tmp_path: Path) -> None:
    Files(tmp_path).write(proc__self__cgroup="0::/box\n", sys__fs__cgroup__box__cpuDOTmax="max 100000\n")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert machine.usable_cores(tmp_path) == cores


@pytest.mark.parametrize(
    ("line", "features"),
    [
        ("Features\t: fp asimd asimddp i8mm sve", ("asimddp", "i8mm", "sve")),
        ("flags\t\t: fpu sse2 avx2 avx512f amx_int8", ("avx2", "avx512f", "amx_int8")),
        ("flags\t\t: fpu", ()),
    ],
)
def test_only_the_features_that_matter_are_listed(tmp_path: Path, line: str, features: tuple[str, ...]) -> None:
    Files(tmp_path).write(proc__cpuinfo=f"processor\t: 0\n{line}\n\nprocessor\t: 1\n{line}\n")
    assert machine.cpu_features(tmp_path) == features
