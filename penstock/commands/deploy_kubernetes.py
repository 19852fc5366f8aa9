"""`penstock deploy kubernetes`: writes the manifests, and says what to do with them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.config import Sourced, flag
from penstock.deploy.kubernetes.bundle import FOLDERS, bundle, write
from penstock.deploy.kubernetes.plan import (
    CLUSTER_OPTIONS,
    KEYS_ENTRY,
    METRICS_ENTRY,
    STORE_ENTRY,
    Plan,
    make_plan,
)


def run(sourced: Sourced, *, out: Path, fleet: Path | None, flags: Mapping[str, Any]) -> int:
    """Write the folder; return the exit status."""
    plan = make_plan(sourced, fleet, flags)
    files = bundle(plan)
    write(files, out)
    for line in report(plan, sourced, out, num_files=len(files)):
        Console().print(line, soft_wrap=True, highlight=False, markup=False)
    return 0


def report(plan: Plan, sourced: Sourced, out: Path, *, num_files: int) -> list[str]:
    """Return what is told of it: the folders, the Secrets that are still to be made, and the first commands."""
    settings = plan.settings
    lines = [f"{num_files} files in {out}:"]
    lines += [f"  {name + '/':<16} {text}" for name, text in FOLDERS.items() if (out / name).exists()]
    left_out = [flag(name) for name in CLUSTER_OPTIONS if name in sourced.sources]
    if left_out:
        lines.append(f"Left out, because the cluster decides: {', '.join(left_out)}")
    secrets = [(settings.metrics_secret_name, METRICS_ENTRY, "an admin key")]
    if settings.keys_secret_name is not None:
        secrets.insert(0, (settings.keys_secret_name, KEYS_ENTRY, "a file of keys, that one among them"))
    if settings.store_secret:
        secrets.append((settings.store_secret, STORE_ENTRY, "the store's URL"))
    lines.append("Secrets to make first:")
    lines += [f"  {name}, entry {entry}: {what}" for name, entry, what in secrets]
    return [*lines, f"Then: kubectl apply -f {out / 'core'}"]
