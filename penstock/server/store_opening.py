"""The store when a server starts: made before any worker needs it, and its keys read.

Loads the database, which takes as long as all else that a supervisor needs: so it is imported when it is used, while
the engine loads. Knows nothing of requests.
"""

import dataclasses
import logging

from penstock.errors import ConfigError, StoreUnavailable
from penstock.server.config import ServerConfig
from penstock.store.database import Database, exists
from penstock.store.keys import KeyStore
from penstock.telemetry import log_event

log = logging.getLogger("penstock.server")


def prepare_store(config: ServerConfig) -> ServerConfig:
    """Make the store and return the configuration with its keys, unless those come from a file.

    Where the default store cannot be made, and nobody's limits need it, go on without. Raises ConfigError or
    StoreUnavailable.
    """
    if config.store is None:
        return config
    # One that is there and cannot be read may hold keys: the server must not open its doors for that.
    is_needed = exists(config.store) or any(key.terms.limits.are_metered for key in config.keys)
    try:
        database = Database.open(config.store)
    except (ConfigError, StoreUnavailable) as error:
        if is_needed or not config.store_is_default:
            raise
        log_event(log, f"no usage is kept: {error}", level=logging.WARNING)
        return dataclasses.replace(config, store=None)
    try:
        if config.keys_file is not None:
            return config
        stored = KeyStore(database)
        return dataclasses.replace(config, keys=stored.load(), needs_keys=config.needs_keys or stored.had_any())
    finally:
        database.close()


def had_keys(location: str) -> bool:
    """Whether a store has or ever had keys. Makes none that is not there."""
    if not exists(location):
        return False
    database = Database.open(location)
    try:
        return KeyStore(database).had_any()
    finally:
        database.close()
