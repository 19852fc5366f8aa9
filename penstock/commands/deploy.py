"""`penstock deploy`: what a cluster needs to run servers and gateways.

The flags are here; what is written or started is `penstock.deploy`, imported when a command runs.
"""

import typer

app = typer.Typer(help="Put servers and gateways on a cluster.", no_args_is_help=True)


@app.callback()
def deploy() -> None:
    """Put servers and gateways on a cluster."""
