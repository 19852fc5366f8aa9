"""`penstock keys`: the API keys in the store, made, listed, replaced and taken back.

Works on the store itself, whether a server runs or not; running servers follow within seconds.
"""

import datetime
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.commands.flags import number_flag, takes_options
from penstock.commands.store import opened_store
from penstock.commands.tables import print_table
from penstock.config import Options, Sourced
from penstock.errors import ConfigError
from penstock.request import MAX_PRIORITY, Targets
from penstock.tenants import LARGEST_WEIGHT, LEAST_WEIGHT, MAX_OVERLAP_SECONDS, KeyTerms, Limits, StoredKey

if TYPE_CHECKING:
    from penstock.store.keys import KeyStore

app = typer.Typer(help="Make, list, replace and revoke API keys.", no_args_is_help=True)

LIMITS, TARGETS = "Limits (default: none)", "Targets"

Name = Annotated[str, typer.Argument(help="The tenant that the key's requests count for")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON")]


def _limit(name: str) -> Any:
    return number_flag(name, kind=int, low=1, rich_help_panel=LIMITS, show_default=False)


@app.command()
@takes_options("store")
def create(
    sourced: Sourced,
    name: Name,
    admin: Annotated[bool, typer.Option("--admin", help="Also opens admin routes")] = False,
    weight: Annotated[
        float,
        number_flag(
            "--weight", "Share of a busy engine, against other tenants'", low=LEAST_WEIGHT, high=LARGEST_WEIGHT
        ),
    ] = 1.0,
    priority: Annotated[
        int | None,
        number_flag(
            "--priority",
            "Of its requests, and the highest they may ask for; larger runs earlier (default: 0)",
            kind=int,
            low=-MAX_PRIORITY,
            high=MAX_PRIORITY,
        ),
    ] = None,
    models: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="The only models it may use", show_default=False)
    ] = None,
    requests_per_minute: Annotated[int | None, _limit("--requests-per-minute")] = None,
    input_tokens_per_minute: Annotated[int | None, _limit("--input-tokens-per-minute")] = None,
    output_tokens_per_minute: Annotated[int | None, _limit("--output-tokens-per-minute")] = None,
    concurrent_requests: Annotated[int | None, _limit("--concurrent-requests")] = None,
    tokens_per_day: Annotated[int | None, _limit("--tokens-per-day")] = None,
    longest_context: Annotated[int | None, _limit("--longest-context")] = None,
    ttft_seconds: Annotated[
        float | None,
        number_flag("--ttft-seconds", open_low=True, rich_help_panel=TARGETS, show_default=False),
    ] = None,
    time_per_token_seconds: Annotated[
        float | None,
        number_flag("--time-per-token-seconds", open_low=True, rich_help_panel=TARGETS, show_default=False),
    ] = None,
    deadline_seconds: Annotated[
        float | None,
        number_flag("--deadline-seconds", open_low=True, rich_help_panel=TARGETS, show_default=False),
    ] = None,
    json: Json = False,
) -> int:
    """Make a key and print it. It is shown this once."""
    terms = KeyTerms(
        admin=admin,
        weight=weight,
        priority=priority,
        models=None if models is None else tuple(part.strip() for part in models.split(",") if part.strip()),
        limits=Limits(
            requests_per_minute=requests_per_minute,
            input_tokens_per_minute=input_tokens_per_minute,
            output_tokens_per_minute=output_tokens_per_minute,
            concurrent_requests=concurrent_requests,
            tokens_per_day=tokens_per_day,
            longest_context=longest_context,
        ),
        targets=Targets(
            ttft_seconds=ttft_seconds,
            time_per_token_seconds=time_per_token_seconds,
            deadline_seconds=deadline_seconds,
        ),
    )
    with stored_keys(sourced.options, may_make=True) as store:
        show_secret(name, store.create(name, terms), as_json=json)
    return 0


@app.command("list")
@takes_options("store")
def list_keys(sourced: Sourced, json: Json = False) -> int:
    """List the keys, without their secrets."""
    with stored_keys(sourced.options) as store:
        show_keys(store.list(), as_json=json)
    return 0


@app.command()
@takes_options("store")
def revoke(sourced: Sourced, name: Name) -> int:
    """Take a key back: running servers refuse it within seconds."""
    with stored_keys(sourced.options) as store:
        store.revoke(name)
    Console().print(Text(f"{name} is revoked"), soft_wrap=True)
    return 0


@app.command()
@takes_options("store")
def rotate(
    sourced: Sourced,
    name: Name,
    overlap: Annotated[
        str, typer.Option(metavar="TIME", help="How long the old one works as well: 90s, 30m, 24h, 7d; at most 30d")
    ] = "0s",
    json: Json = False,
) -> int:
    """Give a key a new secret and print it. It is shown this once."""
    seconds = parse_overlap("--overlap", overlap)
    with stored_keys(sourced.options) as store:
        show_secret(name, store.rotate(name, overlap_seconds=seconds), as_json=json)
    return 0


@contextmanager
def stored_keys(options: Options, *, may_make: bool = False) -> Iterator["KeyStore"]:
    """Open the keys of the store that the options name."""
    from penstock.store.keys import KeyStore

    with opened_store(options, may_make=may_make) as database:
        yield KeyStore(database)


def parse_overlap(option: str, text: str) -> float:
    """Return the seconds in "90s", "30m", "24h" or "7d"."""
    match = re.fullmatch(r"\s*(\d+)\s*([smhd])\s*", text, re.ASCII)
    if match is None:
        raise ConfigError(option, text, "give a time such as 90s, 30m, 24h or 7d")
    seconds = float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
    if seconds > MAX_OVERLAP_SECONDS:
        raise ConfigError(option, text, f"give at most {MAX_OVERLAP_SECONDS // 86400}d; to end both, revoke the key")
    return seconds


def show_secret(name: str, secret: str, *, as_json: bool) -> None:
    """Print a new secret: alone on standard output, so that a script can take it."""
    if as_json:
        print(json.dumps({"name": name, "key": secret}, indent=2))
        return
    print(secret)
    note = f"This is {name}'s key. It is not kept and cannot be shown again."
    Console(stderr=True).print(Text(note, style="dim"), soft_wrap=True)


def show_keys(keys: list[StoredKey], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(msgspec.to_builtins(keys), indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("key", "state", "made", "weight", "priority", "models", "limits", "targets"):
        table.add_column(column, overflow="fold")
    for key in keys:
        terms = key.terms
        table.add_row(
            Text(key.name + (" (admin)" if terms.admin else "")),
            _state(key),
            _day(key.created_at),
            f"{terms.weight:g}",
            str(terms.priority or 0),
            Text(", ".join(terms.models) if terms.models is not None else "all"),
            _stated(terms.limits),
            _stated(terms.targets),
        )
    print_table(table)


def _stated(struct: msgspec.Struct) -> str:
    """Return the fields that say something, which are those that would be written."""
    return ", ".join(f"{name} {value}" for name, value in msgspec.to_builtins(struct).items()) or "none"


def _state(key: StoredKey) -> str:
    if key.revoked_at is not None:
        return f"revoked {_day(key.revoked_at)}"
    return "in force" if key.num_secrets == 1 else f"in force, {key.num_secrets} secrets"


def _day(moment: float) -> str:
    return datetime.datetime.fromtimestamp(moment, tz=datetime.UTC).date().isoformat()
