"""A store for each test, on either database. PostgreSQL has its own clock; SQLite gets one that tests can move."""

import contextlib

import pytest

from penstock.store.database import Database

NOON = 1_750_000_000.0 - 1_750_000_000.0 % 86400 + 43200


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self, now: float = NOON) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def after_each_transaction(monkeypatch, look):
    """Have `look` called with a connection behind every transaction that writes, from now on."""
    writing = Database.writing

    @contextlib.contextmanager
    def looked_after(database):
        with writing(database) as connection:
            yield connection
        with database.reading() as connection:
            look(connection)

    monkeypatch.setattr(Database, "writing", looked_after)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sqlite_database(tmp_path, clock):
    database = Database.open(str(tmp_path / "penstock.db"), clock=clock)
    yield database
    database.close()


@pytest.fixture(params=["sqlite", "postgres"])
def any_location(request, tmp_path):
    """Where an empty store is to be, on each database."""
    if request.param == "sqlite":
        return str(tmp_path / "penstock.db")
    return request.getfixturevalue("empty_postgres_url")


@pytest.fixture
def any_database(any_location):
    database = Database.open(any_location)
    yield database
    database.close()
