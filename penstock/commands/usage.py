"""`penstock usage`: what each tenant used of each model, from the store's ledger."""

import datetime
import json
import re

import msgspec
from rich.table import Table
from rich.text import Text

from penstock.commands.store import opened_store
from penstock.commands.tables import print_table
from penstock.config import Options
from penstock.errors import ConfigError
from penstock.store.ledger import UsageLedger
from penstock.tenants import Usage

_COUNTS = ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "refused", "errors")


def run(options: Options, *, tenant: str | None, since: str | None, as_json: bool) -> int:
    if since is not None:
        since = parse_day("--since", since)
    with opened_store(options) as database:
        entries = UsageLedger(database).read(tenant=tenant, since=since)
    show(entries, as_json=as_json)
    return 0


def parse_day(option: str, text: str) -> str:
    """Return the day in "2026-01-31" or "7d", seven days back, as the ledger writes it."""
    if re.fullmatch(r"[0-9]{1,5}d", text):
        today = datetime.datetime.now(tz=datetime.UTC).date()
        return (today - datetime.timedelta(days=int(text[:-1]))).isoformat()
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise ConfigError(option, text, "give a day such as 2026-01-31, or 7d for the last seven") from None


def show(entries: list[Usage], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(msgspec.to_builtins(entries), indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("day", "tenant", "model"):
        table.add_column(column, overflow="fold")
    for column in _COUNTS:
        table.add_column(column.replace("_", " "), justify="right")
    for entry in entries:
        counts = [f"{getattr(entry, name):,}" for name in _COUNTS]
        table.add_row(entry.day, Text(entry.tenant), Text(entry.model), *counts)
    print_table(table)
