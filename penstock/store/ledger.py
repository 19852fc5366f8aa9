"""The usage ledger: what each tenant used of each model on each day.

Additions only, many in one transaction. Days are UTC's. Knows nothing of limits.
"""

import datetime
from collections.abc import Iterable

import msgspec
from sqlalchemy import Connection, select

from penstock.store.database import Database, insert_into
from penstock.store.schema import MAX_MODEL_CHARACTERS, usage
from penstock.tenants import Usage

_COUNTS = ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "refused", "errors")


def day_of(moment: float) -> str:
    """Return the UTC day of a Unix time."""
    return datetime.datetime.fromtimestamp(moment, tz=datetime.UTC).date().isoformat()


class UsageLedger:
    def __init__(self, database: Database) -> None:
        self._database = database

    def read(self, *, tenant: str | None = None, since: str | None = None) -> list[Usage]:
        """Return the entries of a tenant (None: of all) from a day on, oldest day first."""
        wanted = select(usage).order_by(usage.c.day, usage.c.tenant, usage.c.model)
        if tenant is not None:
            wanted = wanted.where(usage.c.tenant == tenant)
        if since is not None:
            wanted = wanted.where(usage.c.day >= since)
        with self._database.reading() as connection:
            return [Usage(**row._mapping) for row in connection.execute(wanted)]


def add_usage(connection: Connection, entries: Iterable[Usage]) -> None:
    """Add to the ledger, within the caller's transaction."""
    for entry in merge_usage(entries):
        row = insert_into(connection, usage, msgspec.structs.asdict(entry))
        added = {name: usage.c[name] + row.excluded[name] for name in _COUNTS}
        connection.execute(row.on_conflict_do_update(index_elements=["tenant", "model", "day"], set_=added))


def merge_usage(entries: Iterable[Usage]) -> list[Usage]:
    """One entry for each key, in an order that is everywhere the same, so that no two writers wait for each other."""
    merged: dict[tuple[str, str, str], Usage] = {}
    for entry in entries:
        model = _storable(entry.model)
        key = (entry.tenant, model, entry.day)
        known = merged.setdefault(key, Usage(tenant=entry.tenant, model=model, day=entry.day))
        for name in _COUNTS:
            setattr(known, name, getattr(known, name) + getattr(entry, name))
    return [merged[key] for key in sorted(merged)]


def _storable(model: str) -> str:
    """Return a model's name as any database takes it: one that it refused would keep all others from being written."""
    return model.replace("\0", "")[:MAX_MODEL_CHARACTERS]
