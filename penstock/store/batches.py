"""Batches as their tenants see them: made, found, listed and cancelled.

What is done with them is `batch_work`'s. Knows nothing of HTTP.
"""

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Connection, and_, func, insert, or_, select, update

from penstock.errors import BatchNotFound, RequestError, StorageFull
from penstock.store.database import Database
from penstock.store.schema import batches

# In these a batch still has to be worked on.
OPEN_STATUSES = ("validating", "in_progress", "finalizing", "cancelling")
MAX_OPEN_BATCHES = 100  # of one tenant


class InputError(msgspec.Struct, frozen=True):
    """What is wrong with a batch's file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBatch:
    id: str
    tenant: str
    endpoint: str
    model: str | None
    completion_window: str
    labels: dict[str, str] | None
    status: str
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    errors: list[InputError]
    created_at: float
    expires_at: float
    moments: dict[str, float]
    num_rows: int
    num_completed: int
    num_failed: int
    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBatch:
    """A batch to be made."""

    endpoint: str
    model: str | None
    input_file_id: str
    completion_window: str
    window_seconds: float
    labels: dict[str, str] | None


class BatchStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    def check_room(self, tenant: str) -> None:
        """Raise StorageFull where a tenant has as many open batches as it may have."""
        with self._database.reading() as connection:
            _check_room(connection, tenant)

    def create(self, tenant: str, new: NewBatch) -> StoredBatch:
        """Add a batch, which somebody will take up. Raises StorageFull."""
        batch_id = f"batch_{uuid.uuid4().hex}"
        with self._database.writing() as connection:
            _check_room(connection, tenant)
            now = self._database.now(connection)
            row = {
                "id": batch_id,
                "tenant": tenant,
                "endpoint": new.endpoint,
                "model": new.model,
                "completion_window": new.completion_window,
                "labels": json.dumps(new.labels),
                "status": "validating",
                "input_file_id": new.input_file_id,
                "errors": "[]",
                "created_at": now,
                "expires_at": now + new.window_seconds,
                "moments": "{}",
                **dict.fromkeys(("num_rows", "num_completed", "num_failed", "term", "held_until"), 0),
            }
            connection.execute(insert(batches).values(row))
        self._database.flush()
        return self.find(tenant, batch_id)

    def find(self, tenant: str, batch_id: str) -> StoredBatch:
        """Return one of a tenant's batches. Raises BatchNotFound, of another tenant's batch as of none."""
        with self._database.reading() as connection:
            return _find(connection, tenant, batch_id)

    def list(self, tenant: str, *, after: str | None, limit: int) -> list[StoredBatch]:
        """Return a page of a tenant's batches, newest first, behind the one that `after` names."""
        wanted = select(batches).where(batches.c.tenant == tenant)
        with self._database.reading() as connection:
            if after is not None:
                last = _find(connection, tenant, after)
                wanted = wanted.where(
                    or_(
                        batches.c.created_at < last.created_at,
                        and_(batches.c.created_at == last.created_at, batches.c.id < last.id),
                    )
                )
            wanted = wanted.order_by(batches.c.created_at.desc(), batches.c.id.desc()).limit(limit)
            return [stored_batch(row) for row in connection.execute(wanted).mappings()]

    def cancel(self, tenant: str, batch_id: str) -> StoredBatch:
        """Ask for a batch's end; what is finished by then is kept. Raises RequestError where it has ended."""
        with self._database.writing() as connection:
            batch = _find(connection, tenant, batch_id, locks=True)
            if batch.status not in OPEN_STATUSES:
                raise RequestError(f"the batch is {batch.status} and cannot be cancelled", param="batch_id")
            if batch.status != "cancelling":
                change_status(connection, batch, "cancelling", self._database.now(connection))
            return _find(connection, tenant, batch_id)


def change_status(connection: Connection, batch: StoredBatch, status: str, now: float, **values: object) -> None:
    """Move a locked batch on, and write down when."""
    moments = json.dumps(batch.moments | {status: now})
    connection.execute(update(batches).where(batches.c.id == batch.id).values(status=status, moments=moments, **values))


def stored_batch(row: Mapping[Any, Any]) -> StoredBatch:
    values = {name: row[name] for name in StoredBatch.__slots__}
    values["labels"], values["moments"] = json.loads(row["labels"]), json.loads(row["moments"])
    values["errors"] = msgspec.json.decode(row["errors"], type=list[InputError])
    return StoredBatch(**values)


def _check_room(connection: Connection, tenant: str) -> None:
    is_open = and_(batches.c.tenant == tenant, batches.c.status.in_(OPEN_STATUSES))
    if connection.execute(select(func.count()).where(is_open)).scalar_one() >= MAX_OPEN_BATCHES:
        raise StorageFull(f"{MAX_OPEN_BATCHES} of your batches are open, which is the limit; wait for one")


def _find(connection: Connection, tenant: str, batch_id: str, *, locks: bool = False) -> StoredBatch:
    wanted = select(batches).where(batches.c.id == batch_id, batches.c.tenant == tenant)
    row = connection.execute(wanted.with_for_update() if locks else wanted).mappings().first()
    if row is None:
        raise BatchNotFound(f"there is no batch {batch_id[:100]!r}; see GET /v1/batches")
    return stored_batch(row)
