"""The store's database: made once, private, refused where it is not ours, silent about what it holds."""

import contextlib
import sqlite3
import stat
import threading

import pytest
from sqlalchemy import select, text, update

from penstock.errors import ConfigError, StoreUnavailable
from penstock.store.database import Database, exists
from penstock.store.files import FileStore
from penstock.store.keys import KeyStore
from penstock.store.location import default_location, shown
from penstock.store.schema import SCHEMA_VERSION, batch_rows, batches, file_chunks, files, identity, state
from penstock.tenants import KeyTerms


def version(database):
    with database.reading() as connection:
        return connection.execute(select(state.c.schema_version)).scalar_one()


def test_a_new_store_has_the_schemas_version(any_database):
    assert version(any_database) == SCHEMA_VERSION


def test_a_store_can_be_opened_again(any_location):
    for _ in range(2):
        database = Database.open(any_location)
        assert version(database) == SCHEMA_VERSION
        database.close()


def test_a_connection_in_use_when_the_store_closes_is_closed_when_it_is_given_back(tmp_path):
    database = Database.open(str(tmp_path / "penstock.db"))
    with database.reading() as connection:
        driver = connection.connection.dbapi_connection
        database.close()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        driver.execute("SELECT 1")


def test_many_may_open_a_new_store_together(any_location):
    failures = []

    def start():
        try:
            Database.open(any_location).close()
        except (ConfigError, StoreUnavailable) as error:
            failures.append(error)

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []


def test_a_new_file_that_somebody_holds_is_waited_for(tmp_path):
    path = tmp_path / "penstock.db"
    holder = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    holder.execute("BEGIN IMMEDIATE")
    holder.execute("CREATE TABLE theirs (id INTEGER)")
    release = threading.Timer(0.3, holder.execute, ["COMMIT"])
    release.start()
    database = Database.open(str(path))
    assert version(database) == SCHEMA_VERSION
    database.close()
    release.join()
    holder.close()


def test_an_older_store_gets_the_tables_that_it_lacks(any_location):
    with contextlib.closing(Database.open(any_location)) as database:
        KeyStore(database).create("alice", KeyTerms())
        with database.writing() as connection:
            connection.execute(update(state).values(schema_version=1))
            for table in (batch_rows, batches, file_chunks, files, identity):
                table.drop(connection)
    with contextlib.closing(Database.open(any_location)) as database:
        assert version(database) == SCHEMA_VERSION
        assert [key.name for key in KeyStore(database).list()] == ["alice"]
        assert database.identity
        assert FileStore(database).list("alice", after=None, limit=1) == []


def test_a_store_has_an_identity_that_everybody_on_it_sees_and_no_other_has(any_location, tmp_path):
    identities = []
    for location in (any_location, any_location, str(tmp_path / "other.db")):
        with contextlib.closing(Database.open(location)) as database:
            identities.append(database.identity)
    assert len(identities[0]) == 32
    assert identities[0] == identities[1] != identities[2]


def test_a_store_of_another_version_is_refused(any_location):
    database = Database.open(any_location)
    with database.writing() as connection:
        connection.execute(update(state).values(schema_version=SCHEMA_VERSION + 1))
    database.close()
    with pytest.raises(ConfigError, match=f"version {SCHEMA_VERSION + 1}"):
        Database.open(any_location)


def test_a_transaction_that_fails_leaves_nothing(any_database):
    with contextlib.suppress(ZeroDivisionError), any_database.writing() as connection:
        connection.execute(update(state).values(keys_version=99))
        raise ZeroDivisionError
    with any_database.reading() as connection:
        assert connection.execute(select(state.c.keys_version)).scalar_one() == 1


def test_the_file_is_its_owners_alone(tmp_path):
    path = tmp_path / "new" / "store.db"
    Database.open(str(path)).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("location", ["mysql://host/x", "postgresql://host:port/x", "redis://x", "sqlite://host/path"])
def test_what_is_no_store_is_refused_with_what_would_be(location):
    with pytest.raises(ConfigError, match="postgresql://"):
        Database.open(location)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        Database.open(str(tmp_path / "file" / "store.db"))


def test_a_file_that_is_no_database_is_refused_by_its_path_and_its_content_is_not_told(tmp_path):
    path = tmp_path / "store.db"
    path.write_text("a secret that is no database " * 100)
    with pytest.raises(ConfigError) as caught:
        Database.open(str(path))
    assert str(caught.value).startswith(f"--store: '{path}' is not usable; this file is no SQLite database; give ")
    assert "secret" not in str(caught.value)


def test_who_opens_a_store_that_does_not_work_is_told_which_and_why_without_its_password():
    pytest.importorskip("psycopg")
    with pytest.raises(StoreUnavailable) as caught:
        Database.open("postgresql://me:hunter2@127.0.0.1:1/db")
    assert str(caught.value).startswith("the store postgresql://me:***@127.0.0.1:1/db does not work: ")
    assert "refused" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_why_a_store_failed_is_in_the_log_once_and_not_in_the_error(any_database, caplog):
    statement = text("SELECT 'a secret', no_such_thing")
    for _ in range(3):
        with pytest.raises(StoreUnavailable) as caught, any_database.reading() as connection:
            connection.execute(statement)
        assert "no_such_thing" not in str(caught.value)
    told = [record.message for record in caplog.records if record.name == "penstock.store"]
    assert len(told) == 1
    assert told[0].startswith("the store failed: ")
    assert "no_such_thing" in told[0]
    assert "a secret" not in told[0]


def test_a_database_whose_machine_is_gone_is_given_up_as_soon_as_its_url_or_we_say(empty_postgres_url):
    for more, milliseconds in (("", "10000"), ("&tcp_user_timeout=7000", "7000")):
        database = Database.open(empty_postgres_url + more)
        with database.reading() as connection:
            settings = connection.connection.dbapi_connection.info.get_parameters()
        database.close()
        assert settings["tcp_user_timeout"] == milliseconds
        assert settings["keepalives_idle"] == settings["connect_timeout"] == "10"


def test_looking_for_a_store_makes_none(tmp_path):
    path = tmp_path / "store.db"
    assert not exists(str(path))
    assert not path.exists()


def test_a_password_is_never_shown():
    assert shown("postgresql://me:hunter2@host/db") == "postgresql://me:***@host/db"
    assert shown("postgresql://me:hunt/e?r:2@host/db") == "postgresql://me:***@host/db"
    assert shown("postgresql://host/db?user=me&password=hunter2") == "postgresql://host/db?user=me&password=***"
    assert shown("postgresql://host/db?sslpassword=hunter2&a=1") == "postgresql://host/db?sslpassword=***&a=1"
    assert shown("/a/path") == "/a/path"


def test_the_default_is_in_the_users_state_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_location() == str(tmp_path / "penstock" / "penstock.db")
