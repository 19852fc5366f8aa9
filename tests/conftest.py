"""What tests of every kind share."""

from pathlib import Path

import pytest

from penstock.models import store


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's GGUF file, fetched into the user's cache folder once."""
    return store.resolve(store.DEFAULT_MODEL).path
