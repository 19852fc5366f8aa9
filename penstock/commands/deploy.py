"""`penstock deploy`: what a cluster needs to run servers and gateways.

The flags are here; what is written or started is `penstock.deploy`, imported when a command runs.
"""

from pathlib import Path
from typing import Annotated

import typer

from penstock.commands.flags import takes_options
from penstock.config import Sourced

app = typer.Typer(help="Put servers and gateways on a cluster.", no_args_is_help=True)


@app.callback()
def deploy() -> None:
    """Put servers and gateways on a cluster."""


@app.command(epilog="The [deploy] table of the file that --config names holds these and more: docs/operations.md.")
@takes_options()
def kubernetes(
    sourced: Sourced,
    *,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the manifests go")] = Path("deploy"),
    fleet: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The gateway's file, as of `penstock gateway`")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the deployment (default: penstock)")] = None,
    namespace: Annotated[str | None, typer.Option(help="Where it lives (default: penstock)")] = None,
    image: Annotated[str | None, typer.Option(help="The container image (default: penstock:VERSION)")] = None,
    replicas: Annotated[int | None, typer.Option(help="The fewest servers (default: 2)")] = None,
    max_replicas: Annotated[int | None, typer.Option(help="The most (default: 8)")] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs of each server (default: one for each rank)")] = None,
    hostname: Annotated[str | None, typer.Option(help="By which callers reach it (default: any)")] = None,
) -> int:
    """Write Kubernetes manifests for a server's options."""
    from penstock.commands import deploy_kubernetes

    flags = {
        "name": name,
        "namespace": namespace,
        "image": image,
        "replicas": replicas,
        "max_replicas": max_replicas,
        "gpus": gpus,
        "hostname": hostname,
    }
    return deploy_kubernetes.run(sourced, out=out, fleet=fleet, flags=flags)
