"""The store that a command works on, opened for as long as it needs it.

Knows nothing of what is stored. Loads the database only when it is used, so that `--help` stays quick.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.config import Options
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.store.database import Database


@contextmanager
def opened_store(options: Options, *, may_make: bool = False) -> Iterator["Database"]:
    """Open the store that the options name, or else the default one, which is made where it is not there.

    A name where there is no store is taken for a typing error, unless the command `may_make` one.
    """
    from penstock.store.database import Database, exists
    from penstock.store.location import shown, store_location

    location = store_location(options.store)
    if options.store is not None and not may_make and not exists(location):
        raise ConfigError("--store", shown(location), "there is no store: give the one that the server or gateway has")
    database = Database.open(location)
    try:
        yield database
    finally:
        database.close()
