"""`penstock deploy ray`: servers on a Ray cluster, and how a gateway finds them."""

import importlib.util
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from penstock.config import Sourced
from penstock.deploy.ray_serve.settings import ApplicationSettings, Wanted, make_settings
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Asked:
    """Those flags of the command that are not the application's."""

    address: str
    gpus: float | None  # None: by what the cluster and the device are
    remove: bool


def run(sourced: Sourced, asked: Asked, **wanted: Any) -> int:
    """Start, change or remove the application; return the exit status."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("deploy", "ray", "it needs Ray: pip install 'penstock[ray]'")
    # Wrong options are told before a cluster is asked for anything.
    settings = make_settings(sourced, Wanted(**wanted, gpus=asked.gpus))
    from penstock.deploy.ray_serve import application

    application.connect(asked.address)
    console = Console()
    if asked.remove:
        application.remove(settings.name)
        console.print(f"Removed: {settings.name}", highlight=False)
        return 0
    if asked.gpus is None and sourced.options.device in ("auto", "cuda") and application.has_gpus():
        settings = make_settings(sourced, Wanted(**wanted, gpus=1.0))
    application.start(settings)
    console.print(_summary(settings, asked.address), soft_wrap=True, highlight=False, markup=False)
    return 0


def _summary(settings: ApplicationSettings, address: str) -> str:
    fields = [f'address = "{address}"', f'application = "{settings.name}"']
    if settings.replica.key_file is not None:
        fields.append(f'key_file = "{settings.replica.key_file}"')
    number = f"{settings.num_replicas} to {settings.max_replicas}" if settings.max_replicas else settings.num_replicas
    return (
        f"Running: {settings.name}, replicas: {number}\n"
        "To serve them, put this into a file and run `penstock gateway --fleet FILE`:\n\n"
        f"[discovery]\nray = [{{ {', '.join(fields)} }}]"
    )
