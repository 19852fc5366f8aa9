"""The store's database: SQLite in a file by default, PostgreSQL by URL.

Gives transactions that see nobody else's half-done work, and the one clock that all servers on a store share. Knows
nothing of what is stored.
"""

import contextlib
import logging
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Table, create_engine, event, func, inspect, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool

from penstock.errors import ConfigError, PenstockError, StoreUnavailable
from penstock.home_folder import expand_home
from penstock.store.location import shown
from penstock.store.schema import SCHEMA_VERSION, fleet_secret, identity, metadata, state
from penstock.telemetry import log_event

Clock = Callable[[], float]

# A writer waits so long for others before it gives up: far longer than all of them together ever take.
_BUSY_SECONDS = 10
_RETRY_SECONDS = 0.01
# A machine that is gone and closes nothing would else hold up whoever asks it for as long as the system tries it.
_POSTGRES_WAITS = {
    "connect_timeout": _BUSY_SECONDS,
    "tcp_user_timeout": 1000 * _BUSY_SECONDS,
    "keepalives_idle": _BUSY_SECONDS,
    "keepalives_interval": 5,
    "keepalives_count": 3,
}
# Any number of our own: PostgreSQL takes only numbers as names of locks.
_SCHEMA_LOCK = 0x70656E73
_WRITES = "penstock_writes"
# A failure that goes on is in the log so often, whoever meets it.
_TELL_SECONDS = 10
_RIGHT = "give a file's path, or a URL such as postgresql://user@host/database"

log = logging.getLogger("penstock.store")


class Database:
    """One store. Make it with `open`; every method may be called from any thread."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._is_closed = False
        self._is_prepared = False
        self._told: tuple[str, float] | None = None  # the last failure in the log, and when it was written
        event.listen(engine, "checkin", self._take_back)
        self.identity = ""  # unlike any other store's, and the same for everybody on this one
        self.fleet_secret = ""  # by which servers and gateways on this store know each other

    @classmethod
    def open(cls, location: str, *, clock: Clock = time.time) -> "Database":
        """Return the store at a path or URL, made if it is not there. Raises ConfigError or StoreUnavailable."""
        url = _url(location)
        if url.get_backend_name() == "sqlite":
            _make_file(location, Path(url.database or ""))
        database = cls(_make_engine(location, url), clock)
        try:
            database._prepare(location)
        except PenstockError as error:
            database.close()
            if _is_no_database(error.__cause__):
                right = "this file is no SQLite database; give the store's path, or one where nothing is yet"
                raise ConfigError("--store", shown(location), right) from error
            if isinstance(error, StoreUnavailable):  # heard by who starts a process, never by a caller
                reason = _reason(error.__cause__)
                raise StoreUnavailable(f"the store {shown(location)} does not work: {reason}") from error
            raise
        database._is_prepared = True
        return database

    @contextlib.contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that may write. On SQLite nobody else writes meanwhile; on PostgreSQL lock what you read."""
        writer = self._engine.execution_options(**{_WRITES: True})
        with self._failures(), writer.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that only reads, and holds up nobody."""
        with self._failures(), self._engine.begin() as connection:
            yield connection

    def now(self, connection: Connection) -> float:
        """Return the Unix time. Servers on several machines have one PostgreSQL and so one clock."""
        if connection.dialect.name == "postgresql":
            return float(connection.execute(select(func.extract("epoch", func.clock_timestamp()))).scalar_one())
        return self._clock()

    def flush(self) -> None:
        """Bring what is committed to the disk now, also against a power cut. PostgreSQL does so with every commit."""
        if self._engine.dialect.name != "sqlite":
            return
        # Commits are in the log beside the file, on which SQLite holds no lock that closing it here could end. Without
        # a log they are in the file already, and that was flushed.
        with contextlib.suppress(FileNotFoundError):
            log = os.open(f"{self._engine.url.database}-wal", os.O_RDONLY)
            try:
                os.fsync(log)
            except OSError as error:
                raise StoreUnavailable("the store's disk does not work; try again in a moment") from error
            finally:
                os.close(log)

    def close(self) -> None:
        self._is_closed = True
        self._engine.dispose()

    def _take_back(self, _: object, record: ConnectionPoolEntry) -> None:
        # A thread that was given up may still use one when the store is closed; nobody would close that afterwards.
        if self._is_closed:
            record.invalidate()

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Say of any failure of the database only that there was one: its texts hold statements and addresses.

        Why it failed is for the operator, in the log.
        """
        try:
            yield
        except SQLAlchemyError as error:
            if self._is_prepared:
                self._tell(_reason(error))
            raise StoreUnavailable(
                f"the store does not work ({type(error).__name__}); try again in a moment"
            ) from error

    def _tell(self, reason: str) -> None:
        now = time.monotonic()
        if self._told is None or self._told[0] != reason or now - self._told[1] >= _TELL_SECONDS:
            self._told = (reason, now)
            log_event(log, f"the store failed: {reason}", level=logging.ERROR)

    def _prepare(self, location: str) -> None:
        """Make the tables, once, however many processes start together. A store that has them is only read."""
        with self.reading() as connection:
            found = _schema_version(connection)
        if found is None or found < SCHEMA_VERSION:
            with self.writing() as connection:
                if connection.dialect.name == "postgresql":
                    connection.execute(select(func.pg_advisory_xact_lock(_SCHEMA_LOCK)))
                found = _bring_up_to_date(connection)
        if found != SCHEMA_VERSION:
            right = f"its tables are of version {found}, and this Penstock needs {SCHEMA_VERSION}; give another store"
            raise ConfigError("--store", shown(location), right)
        with self.reading() as connection:
            self.identity = str(connection.execute(select(identity.c.value)).scalar_one())
            self.fleet_secret = str(connection.execute(select(fleet_secret.c.value)).scalar_one())


def _bring_up_to_date(connection: Connection) -> int:
    """Make the tables that are not there; return the version that the store then has."""
    found = _schema_version(connection)
    if found is None or found < SCHEMA_VERSION:
        metadata.create_all(connection)
        row = insert_into(connection, state, {"id": 1, "schema_version": SCHEMA_VERSION, "keys_version": 1})
        newer = {"schema_version": SCHEMA_VERSION}
        connection.execute(row.on_conflict_do_update(index_elements=["id"], set_=newer))
        for table, num_bytes in ((identity, 16), (fleet_secret, 32)):
            drawn = insert_into(connection, table, {"id": 1, "value": secrets.token_hex(num_bytes)})
            connection.execute(drawn.on_conflict_do_nothing(index_elements=["id"]))
        found = SCHEMA_VERSION
    return found


def _schema_version(connection: Connection) -> int | None:
    if not inspect(connection).has_table(state.name):
        return None
    return int(connection.execute(select(state.c.schema_version)).scalar_one())


def insert_into(
    connection: Connection, table: Table, values: dict[str, Any] | list[dict[str, Any]]
) -> sqlite.Insert | postgresql.Insert:
    """Return an INSERT that knows `on_conflict_do_…`, which each database writes in its own way."""
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table).values(values)
    return sqlite.insert(table).values(values)


def exists(location: str) -> bool:
    """Whether there may be something to read. Makes nothing."""
    url = _url(location)
    return url.get_backend_name() != "sqlite" or os.path.exists(url.database or "")


def _url(location: str) -> URL:
    if "://" not in location:
        return URL.create("sqlite", database=str(expand_home(location).absolute()))
    try:
        url = make_url(location)
    except (ArgumentError, ValueError):
        raise ConfigError("--store", shown(location), _RIGHT) from None
    if url.drivername in ("postgresql", "postgres"):
        url = url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() not in ("sqlite", "postgresql") or (url.host and url.get_backend_name() == "sqlite"):
        raise ConfigError("--store", shown(location), _RIGHT)
    return url


def _reason(error: BaseException | None) -> str:
    """Return what the database said of a failure, without the statement: the first line, which holds no values."""
    said = str(error.orig if isinstance(error, DBAPIError) else error).strip()
    return said.splitlines()[0] if said else type(error).__name__


def _is_no_database(error: BaseException | None) -> bool:
    original = error.orig if isinstance(error, DBAPIError) else None
    return getattr(original, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB


def _make_file(location: str, path: Path) -> None:
    """Make an empty file that only its owner may read."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise ConfigError("--store", location, f"it cannot be written ({error.strerror})") from error


def _make_engine(location: str, url: URL) -> Engine:
    if url.get_backend_name() == "sqlite":
        engine = create_engine(url, poolclass=QueuePool, connect_args={"timeout": _BUSY_SECONDS})
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    # What the URL says itself is left as it is.
    waits = {name: value for name, value in _POSTGRES_WAITS.items() if name not in url.query}
    try:
        return create_engine(url, pool_pre_ping=True, connect_args=waits)
    except (ModuleNotFoundError, NoSuchModuleError) as error:
        right = "PostgreSQL needs a driver: pip install 'penstock[postgres]'"
        raise ConfigError("--store", shown(location), right) from error


def _set_up_sqlite(connection: sqlite3.Connection, _: object) -> None:
    # The driver would begin transactions by itself, and too late; `_begin_sqlite` does.
    connection.isolation_level = None
    _use_wal(connection)
    # What is committed outlives any process; only a power cut may take the last moments.
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("PRAGMA foreign_keys=ON")


def _use_wal(connection: sqlite3.Connection) -> None:
    # Several who open a new file together stand in each other's way here, and for this SQLite itself does not wait.
    give_up = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                raise
        time.sleep(_RETRY_SECONDS)


def _begin_sqlite(connection: Connection) -> None:
    # A writer takes its lock before it reads, so that nobody can change what it read.
    writes = connection.get_execution_options().get(_WRITES)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
