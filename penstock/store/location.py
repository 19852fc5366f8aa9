"""Where the store is: what `--store` names, and what it means to leave it out.

Loads no database, so that asking costs nothing. Knows nothing of what is stored.
"""

import os
import re
from pathlib import Path

from penstock.errors import ConfigError
from penstock.home_folder import home_folder

# As a location: there is no store.
NO_STORE = "none"


def default_location() -> str:
    """Where the store is unless the operator says otherwise: in the user's folder for state."""
    base = os.environ.get("XDG_STATE_HOME")
    return str((Path(base) if base else home_folder("--store") / ".local" / "state") / "penstock" / "penstock.db")


def store_location(option: str | None) -> str:
    """Return where the store is that `--store` names. Raises ConfigError where it names that there is none."""
    if option == NO_STORE:
        raise ConfigError("--store", option, "this needs a store; leave it out, or give a path or URL")
    return option or default_location()


def shown(location: str) -> str:
    """Return a location as it may be printed: without a password, wherever in the URL it stands."""
    without = re.sub(r"(://[^/@:?]*):.*@", r"\1:***@", location)
    return re.sub(r"([?&](?:ssl)?password=)[^&]*", r"\1***", without)
