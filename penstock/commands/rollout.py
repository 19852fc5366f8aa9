"""`penstock rollout`: begin, follow and end the rollout of a model's new version.

Works on the store that the gateways share; they follow within seconds.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.commands.flags import takes_options
from penstock.commands.store import opened_store
from penstock.config import Options, Sourced

if TYPE_CHECKING:
    from penstock.store.rollouts import RolloutStore

app = typer.Typer(help="Roll out a model's new version behind a gateway.", no_args_is_help=True)

Model = Annotated[str, typer.Argument(help="The model, as replicas call it")]


@app.command()
@takes_options("store")
def start(
    sourced: Sourced,
    model: Model,
    candidate: Annotated[str, typer.Argument(metavar="VERSION", help="The new version, as its replicas are labelled")],
    fleet: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The gateway's TOML file, for steps, limits and what is stable", show_default=False
        ),
    ] = None,
) -> int:
    """Begin a rollout: gateways then send it copies, then more and more requests, or roll it back."""
    from penstock.fleet.fleet_file import read_fleet
    from penstock.fleet.rollout.controller import start_rollout
    from penstock.fleet.rollout.plan import RolloutSection
    from penstock.fleet.rollout.report import write_report

    section = read_fleet(fleet).rollouts.get(model, RolloutSection()) if fleet is not None else None
    with _book(sourced.options) as book:
        typer.echo(write_report(start_rollout(book, model, candidate, section)), nl=False)
    return 0


@app.command()
@takes_options("store")
def status(
    sourced: Sourced,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of Markdown")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it to a file instead", show_default=False)
    ] = None,
) -> int:
    """Show every rollout: its steps, what was found in each, and what was decided."""
    import msgspec

    from penstock.fleet.rollout.controller import read_rollouts, shared_evidence
    from penstock.fleet.rollout.report import write_report

    with _book(sourced.options) as book:
        found = [(item, shared_evidence(book, item) if item.is_running else None) for item in read_rollouts(book)]
    if as_json:
        reports = [{"rollout": item, "evidence": evidence} for item, evidence in found]
        text = json.dumps(msgspec.to_builtins({"rollouts": reports}, str_keys=True), indent=2) + "\n"
    else:
        text = "\n".join(write_report(item, evidence) for item, evidence in found) or "No rollout.\n"
    if out is not None:
        out.write_text(text, encoding="utf-8")
    else:
        typer.echo(text, nl=False)
    return 0


@app.command()
@takes_options("store")
def abort(sourced: Sourced, model: Model) -> int:
    """End a rollout: every request goes to the stable version."""
    from penstock.fleet.rollout.controller import abort_rollout
    from penstock.fleet.rollout.report import write_report

    with _book(sourced.options) as book:
        typer.echo(write_report(abort_rollout(book, model)), nl=False)
    return 0


@contextmanager
def _book(options: Options) -> Iterator["RolloutStore"]:
    from penstock.store.rollouts import RolloutStore

    with opened_store(options) as database:
        yield RolloutStore(database)
