"""`penstock deploy kubernetes`: writes the manifests, and says what to do with them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.config import Sourced, flag
from penstock.deploy.kubernetes.bundle import FOLDERS, bundle, write
from penstock.deploy.kubernetes.plan import (
    CLUSTER_OPTIONS,
    HUB_ENTRY,
    KEYS_ENTRY,
    METRICS_ENTRY,
    STORE_ENTRY,
    Plan,
    make_plan,
)
from penstock.deploy.kubernetes.settings import Settings


def run(sourced: Sourced, *, out: Path, fleet: Path | None, flags: Mapping[str, Any]) -> int:
    """Write the folder; return the exit status."""
    plan = make_plan(sourced, fleet, flags)
    files = bundle(plan)
    write(files, out)
    for line in report(plan, sourced, out, num_files=len(files)):
        Console().print(line, soft_wrap=True, highlight=False, markup=False)
    return 0


def report(plan: Plan, sourced: Sourced, out: Path, *, num_files: int) -> list[str]:
    """Return what is told of it: the folders, what is still to be made, and the commands in an order that works."""
    lines = [f"{num_files} files in {out}:"]
    lines += [f"  {name + '/':<16} {text}" for name, text in FOLDERS.items() if (out / name).exists()]
    left_out = [flag(name) for name in CLUSTER_OPTIONS if name in sourced.sources]
    if left_out:
        lines.append(f"Left out, because the cluster decides: {', '.join(left_out)}")
    namespace = plan.settings.namespace
    lines.append("Then, with an admin key in KEY that is one of keys.toml (docs/operations.md):")
    lines.append(f"  kubectl apply -f {out / 'core/00-namespace.yaml'}")
    lines += [f"  kubectl -n {namespace} create secret generic {secret}" for secret in _secrets(plan.settings)]
    lines.append(f"  kubectl apply -f {out / 'core'} -f {out / 'servers'}")
    there = [("image pull secret", plan.settings.image_pull_secret), ("claim", plan.settings.cache_claim)]
    return [*lines, *[f"Must be there too: the {kind} {name}" for kind, name in there if name]]


def _secrets(settings: Settings) -> list[str]:
    """Each Secret that pods need, as `kubectl create secret generic` makes it."""
    made = [f'{settings.metrics_secret_name} --from-literal={METRICS_ENTRY}="$KEY"']
    if settings.keys_secret_name is not None:
        made.insert(0, f"{settings.keys_secret_name} --from-file={KEYS_ENTRY}")
    if settings.store_secret:
        made.append(f'{settings.store_secret} --from-literal={STORE_ENTRY}="$PENSTOCK_STORE"')
    if settings.hub_secret:
        made.append(f'{settings.hub_secret} --from-literal={HUB_ENTRY}="$HF_TOKEN"')
    return made
