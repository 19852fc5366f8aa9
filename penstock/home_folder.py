"""The user's home folder in paths: `~` as people write it, and where things are kept by default.

Knows nothing of what is kept there.
"""

import os
from pathlib import Path

from penstock.errors import ConfigError


def expand_home(path: str | Path) -> Path:
    """Return the path with its `~` replaced; as it is where that is nobody's home folder, to be found missing."""
    return Path(os.path.expanduser(path))


def home_folder(option: str) -> Path:
    """Return the user's home folder. `option` names another place for what goes there. Raises ConfigError."""
    home = expand_home("~")
    if not home.is_absolute():
        raise ConfigError(option, "default", "this user has no home folder; give a path, or set HOME")
    return home
