"""Facts about this computer: its cores, memory and limits, read from the operating system.

Knows nothing of torch or models. What the system does not tell is None, never a guess.
"""

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

# The instructions that decide which CPU kernels can be used, by architecture.
ARM_FEATURES = ("asimddp", "i8mm", "bf16", "sve", "sve2")
X86_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. `limit` and `limit_used` are the container's, where it has one."""

    total: int | None
    available: int | None
    limit: int | None = None
    limit_used: int | None = None

    @property
    def usable(self) -> int | None:
        """What a new process can still take: the machine's or the container's rest, whichever is less."""
        rests = [self.available] if self.available is not None else []
        if self.limit is not None:
            rests.append(max(0, self.limit - (self.limit_used or 0)))
        return min(rests, default=None)


def is_arm() -> bool:
    return platform.machine().lower() in ("aarch64", "arm64")


def is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def cpu_features(root: Path = Path("/")) -> tuple[str, ...] | None:
    """Return those of the features above that the CPU has; None where the system does not list them."""
    text = _read(root / "proc/cpuinfo")
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", text or "", re.MULTILINE)
    if match is None:
        return None
    present = set(match[1].split())
    return tuple(name for name in ARM_FEATURES + X86_FEATURES if name in present)


def usable_cores(root: Path = Path("/")) -> float:
    """Return how many cores this process may use: its affinity, cut by the container's quota."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    for folder in _control_groups(root, "cpu"):
        quota, _, period = (_read(folder / "cpu.max") or "").partition(" ")
        if not quota:
            quota, period = (_read(folder / name) or "" for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        if quota.isdigit() and period.strip().isdigit():
            cores = min(cores, int(quota) / int(period))
    return cores


def memory(root: Path = Path("/")) -> Memory:
    text = _read(root / "proc/meminfo") or ""
    sizes = {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    total, available = sizes.get("MemTotal"), sizes.get("MemAvailable")
    limits = []
    for folder in _control_groups(root, "memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes") or ""
        # Version 1 writes "no limit" as a number beyond any machine's memory.
        if limit.isdigit() and (total is None or int(limit) < total):
            limits.append((int(limit), _charged(folder)))
    limit_bytes, limit_used = min(limits, default=(None, None))
    return Memory(total, available, limit_bytes, limit_used)


def _charged(folder: Path) -> int:
    """Return the bytes a control group holds, less the file cache that it would give up at once."""
    used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes") or "0"
    cached = re.search(r"^(?:total_)?inactive_file (\d+)$", _read(folder / "memory.stat") or "", re.MULTILINE)
    return max(0, int(used) - int(cached[1] if cached else 0))


def _control_groups(root: Path, controller: str) -> list[Path]:
    """Return the folders that may hold this process's limits, nearest first, for versions 2 and 1."""
    base = root / "sys/fs/cgroup"
    folders = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folders.append(base / path.lstrip("/"))
        elif controller in controllers.split(","):
            folders += [base / controllers / path.lstrip("/"), base / controllers]
    return [*folders, base]


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
