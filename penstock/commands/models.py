"""`penstock pull` and `penstock models`: what the model store can name, and what it has."""

import json
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.commands.progress import fetch_bar
from penstock.commands.tables import print_table
from penstock.config import Options
from penstock.models import store


@dataclass(frozen=True, slots=True)
class ListedModel:
    name: str
    num_bytes: int  # on disk, or to fetch where `path` is None
    path: str | None
    revision: str | None = None  # of a hub model


def pull(options: Options) -> int:
    try:
        with fetch_bar() as report:
            files = store.pull(options.model, cache_dir=options.cache_dir, revision=options.revision, progress=report)
    except KeyboardInterrupt:
        note = "stopped; what came so far is kept, and the same command goes on from there"
        Console(stderr=True).print(Text(note), soft_wrap=True)
        raise
    Console().print(Text(f"{files.name} is at {files.path}"), soft_wrap=True)
    return 0


def fetch(options: Options) -> store.ModelFiles:
    """Return the files of the model that the options name, fetched under a bar if they are not here."""
    with fetch_bar() as report:
        return store.resolve(
            options.model,
            cache_dir=options.cache_dir,
            revision=options.revision,
            load_format=options.load_format,
            progress=report,
        )


def list_models(cache_dir: str | None) -> list[ListedModel]:
    """Return the fetched models, then the aliases that are not."""
    fetched = [
        ListedModel(item.name, item.num_bytes, str(item.path), item.revision) for item in store.installed(cache_dir)
    ]
    names = {item.name for item in fetched}
    return fetched + [
        ListedModel(name, wheel.wheel_bytes, None) for name, wheel in store.ALIASES.items() if name not in names
    ]


def show(options: Options, *, as_json: bool) -> int:
    listed = list_models(options.cache_dir)
    if as_json:
        document = [
            {"name": item.name, "revision": item.revision, "bytes": item.num_bytes, "path": item.path}
            for item in listed
        ]
        print(json.dumps(document, indent=2))
        return 0
    table = Table(box=None, pad_edge=False, header_style="bold")
    has_revisions = any(item.revision for item in listed)
    table.add_column("model")
    if has_revisions:
        table.add_column("revision", overflow="fold")
    table.add_column("size", justify="right")
    table.add_column("where", overflow="fold")
    for item in listed:
        where = item.path or f"not fetched: penstock pull {item.name}"
        revision = [Text(item.revision or "")] if has_revisions else []
        table.add_row(Text(item.name), *revision, f"{item.num_bytes / 1e6:.0f} MB", Text(where))
    print_table(table)
    return 0
