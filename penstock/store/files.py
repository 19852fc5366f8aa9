"""Files of tenants, in pieces: there for their tenant once they are complete, and for nobody else ever.

A file is written piece by piece, each in a transaction of its own, so that a large one holds up no other writer; it
appears when `complete` is committed. So is it removed, after nobody can see it any more. What a killed process left
unfinished is swept away. Knows nothing of what files
hold.
"""

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, delete, func, insert, or_, select, update

from penstock.errors import StorageFull, UploadNotFound
from penstock.store.database import Database
from penstock.store.schema import file_chunks, files

CHUNK_BYTES = 1024 * 1024
MAX_TENANT_BYTES = 4 * 1024**3
MAX_TENANT_FILES = 10_000
_REMOVED_CHUNKS = 4  # in one transaction

# Longer than the slowest upload that a connection is allowed.
_UNFINISHED_SECONDS = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    id: str
    tenant: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: float


class FileStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, tenant: str, filename: str, purpose: str) -> str:
        """Open a file that nobody sees yet; return its id."""
        file_id = f"file-{uuid.uuid4().hex}"
        with self._database.writing() as connection:
            row = {"id": file_id, "tenant": tenant, "filename": filename, "purpose": purpose, "num_bytes": 0}
            now = self._database.now(connection)
            connection.execute(insert(files).values(row | {"created_at": now, "is_complete": False}))
        return file_id

    def append(self, file_id: str, number: int, data: bytes) -> None:
        """Write one chunk of an open file."""
        with self._database.writing() as connection:
            connection.execute(insert(file_chunks).values(file_id=file_id, number=number, data=data))

    def fill(self, file_id: str, pieces: Iterable[bytes]) -> int:
        """Write an open file's content; return how many bytes it has."""
        num_bytes = 0
        for number, data in enumerate(_chunks(pieces)):
            self.append(file_id, number, data)
            num_bytes += len(data)
        return num_bytes

    def finish(self, tenant: str, file_id: str, filename: str, num_bytes: int) -> StoredFile:
        """Name a filled file and show it to its tenant. Raises StorageFull, and then nothing of it is left."""
        with self._database.writing() as connection:
            refusal = _refusal(connection, tenant, num_bytes)
            if refusal is None:
                complete(connection, file_id, num_bytes)
                connection.execute(update(files).where(files.c.id == file_id).values(filename=filename))
        if refusal is not None:
            self.give_up(file_id)
            raise refusal
        self._database.flush()
        return self.find(tenant, file_id)

    def give_up(self, file_id: str) -> None:
        """Remove an open file, or one that was hidden."""
        with self._database.reading() as connection:
            counted = select(func.max(file_chunks.c.number)).where(file_chunks.c.file_id == file_id)
            last = connection.execute(counted).scalar_one_or_none()
        # From the beginning on: who reads it meanwhile finds that it is gone, and never half of it.
        for start in range(0, 0 if last is None else last + 1, _REMOVED_CHUNKS):
            began = time.monotonic()
            some = file_chunks.c.number.between(start, start + _REMOVED_CHUNKS - 1)
            with self._database.writing() as connection:
                connection.execute(delete(file_chunks).where(file_chunks.c.file_id == file_id, some))
            time.sleep(time.monotonic() - began)  # those who waited meanwhile come first
        with self._database.writing() as connection:
            connection.execute(delete(files).where(files.c.id == file_id))

    def find(self, tenant: str, file_id: str) -> StoredFile:
        """Return one of a tenant's files. Raises UploadNotFound, of another tenant's file as of none."""
        with self._database.reading() as connection:
            return _find(connection, tenant, file_id)

    def list(
        self, tenant: str, *, after: str | None, limit: int, purpose: str | None = None, newest_first: bool = True
    ) -> list[StoredFile]:
        """Return a page of a tenant's files, behind the one that `after` names."""
        wanted = select(files).where(files.c.tenant == tenant, files.c.is_complete)
        if purpose is not None:
            wanted = wanted.where(files.c.purpose == purpose)
        with self._database.reading() as connection:
            if after is not None:
                last = _find(connection, tenant, after)
                earlier = or_(
                    files.c.created_at < last.created_at,
                    and_(files.c.created_at == last.created_at, files.c.id < last.id),
                )
                wanted = wanted.where(earlier if newest_first else and_(~earlier, files.c.id != last.id))
            order = (files.c.created_at, files.c.id)
            wanted = wanted.order_by(*[column.desc() if newest_first else column for column in order]).limit(limit)
            return [_stored(row) for row in connection.execute(wanted).mappings()]

    def read(self, file_id: str) -> Iterator[bytes]:
        """Yield a file's content. Raises UploadNotFound where there is none, or if it is deleted meanwhile."""
        with self._database.reading() as connection:
            counted = select(func.count()).select_from(file_chunks).where(file_chunks.c.file_id == file_id)
            num_chunks = connection.execute(counted).scalar_one()
        for number in range(max(1, num_chunks)):
            wanted = select(file_chunks.c.data).where(file_chunks.c.file_id == file_id, file_chunks.c.number == number)
            with self._database.reading() as connection:
                data = connection.execute(wanted).scalar_one_or_none()
            if data is None:
                raise UploadNotFound(f"file {file_id[:100]!r} is not there, or was deleted while it was read")
            yield bytes(data)

    def delete(self, tenant: str, file_id: str) -> None:
        """Hide one of a tenant's files, then remove it. Raises UploadNotFound."""
        with self._database.writing() as connection:
            _find(connection, tenant, file_id)
            connection.execute(update(files).where(files.c.id == file_id).values(is_complete=False))
        self.give_up(file_id)

    def sweep(self) -> None:
        """Remove what was begun and not completed by processes that are gone."""
        with self._database.reading() as connection:
            oldest = self._database.now(connection) - _UNFINISHED_SECONDS
            unfinished = select(files.c.id).where(~files.c.is_complete, files.c.created_at < oldest)
            found = connection.execute(unfinished).scalars().all()
        for file_id in found:
            self.give_up(file_id)


def complete(connection: Connection, file_id: str, num_bytes: int) -> None:
    """Show a filled file to its tenant, within the caller's transaction."""
    shown = update(files).where(files.c.id == file_id).values(is_complete=True, num_bytes=num_bytes)
    assert connection.execute(shown).rowcount == 1, "an open file is swept away only after a day"


def _refusal(connection: Connection, tenant: str, num_bytes: int) -> StorageFull | None:
    # The counts of two uploads at once may each miss the other: the limit is for disks, not for bills.
    counted = select(func.count(), func.coalesce(func.sum(files.c.num_bytes), 0)).where(
        files.c.tenant == tenant, files.c.is_complete
    )
    num_files, in_use = connection.execute(counted).one()
    if num_files >= MAX_TENANT_FILES:
        return StorageFull(f"you have {num_files} files, which is the limit; delete some")
    if int(in_use) + num_bytes > MAX_TENANT_BYTES:
        return StorageFull(f"your files would be over the limit of {MAX_TENANT_BYTES} bytes together; delete some")
    return None


def _find(connection: Connection, tenant: str, file_id: str) -> StoredFile:
    wanted = select(files).where(files.c.id == file_id, files.c.tenant == tenant, files.c.is_complete)
    row = connection.execute(wanted).mappings().first()
    if row is None:
        raise UploadNotFound(f"there is no file {file_id[:100]!r}; see GET /v1/files")
    return _stored(row)


def _stored(row: Mapping[Any, Any]) -> StoredFile:
    return StoredFile(**{name: row[name] for name in StoredFile.__slots__})


def _chunks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Cut or join pieces to chunks of one size."""
    waiting = bytearray()
    for piece in pieces:
        waiting += piece
        while len(waiting) >= CHUNK_BYTES:
            yield bytes(waiting[:CHUNK_BYTES])
            del waiting[:CHUNK_BYTES]
    if waiting:
        yield bytes(waiting)
