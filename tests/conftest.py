"""What tests of every kind share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.models import store


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's GGUF file, fetched into the user's cache folder once."""
    return store.resolve(store.DEFAULT_MODEL).path


@pytest.fixture(scope="session", autouse=True)
def own_state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the keys and the usage of whoever runs the tests out of them, and theirs out of his."""
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    yield
    if before is None:
        del os.environ["XDG_STATE_HOME"]
    else:
        os.environ["XDG_STATE_HOME"] = before
