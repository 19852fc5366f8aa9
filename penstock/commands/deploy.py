"""`penstock deploy`: what a cluster needs to run servers and gateways.

The flags are here; what is written or started is `penstock.deploy`, imported when a command runs.
"""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from penstock.commands.flags import number_flag, takes_options
from penstock.config import Options, Sourced

app = typer.Typer(help="Put servers and gateways on a cluster.", no_args_is_help=True)


@app.callback()
def deploy() -> None:
    """Put servers and gateways on a cluster."""


@app.command(epilog=r"The \[deploy] table of the file that --config names holds these and more: docs/operations.md.")
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
    replicas: Annotated[
        int | None, number_flag("--replicas", "The fewest servers; 0: none while nobody asks (default: 2)", kind=int)
    ] = None,
    max_replicas: Annotated[int | None, number_flag("--max-replicas", "The most (default: 8)", kind=int, low=1)] = None,
    gpus: Annotated[
        int | None, number_flag("--gpus", "GPUs of each server (default: one for each rank)", kind=int)
    ] = None,
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


@app.command()
@takes_options(*[item.name for item in dataclasses.fields(Options) if item.name not in ("port", "admin_listen")])
def ray(
    sourced: Sourced,
    *,
    address: Annotated[
        str, typer.Option(help="The cluster; auto: that in RAY_ADDRESS, or the one on this machine")
    ] = "auto",
    name: Annotated[str, typer.Option(help="Of the application, by which gateways find its replicas")] = "penstock",
    replicas: Annotated[
        int, number_flag("--replicas", "Servers; with --max-replicas, the fewest", kind=int, low=1)
    ] = 1,
    max_replicas: Annotated[
        int | None,
        number_flag(
            "--max-replicas", "Scale up to so many by the replicas' promises (default: do not scale)", kind=int, low=1
        ),
    ] = None,
    cpus: Annotated[float, number_flag("--cpus", "CPUs to reserve for each rank of a server")] = 1.0,
    gpus: Annotated[
        float | None,
        number_flag("--gpus", "GPUs for each rank (default: 1 where the cluster has any and --device may use it)"),
    ] = None,
    key_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="On every node: an admin key with which a server is asked how it is"),
    ] = None,
    policy: Annotated[str, typer.Option(help="How requests that come through Ray Serve are routed")] = "least-loaded",
    route_prefix: Annotated[
        str | None, typer.Option(help="Path at which Ray Serve's proxies serve them too (default: they do not)")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Drain the servers and take them away")] = False,
) -> int:
    """Run servers on a Ray cluster, for gateways to find there."""
    from penstock.commands import deploy_ray

    asked = deploy_ray.Asked(address=address, gpus=gpus, remove=remove)
    return deploy_ray.run(
        sourced,
        asked,
        name=name,
        replicas=replicas,
        max_replicas=max_replicas,
        cpus=cpus,
        policy=policy,
        route_prefix=route_prefix,
        key_file=key_file,
    )
