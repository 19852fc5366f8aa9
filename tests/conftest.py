"""What tests of every kind share."""

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from hypothesis import HealthCheck, settings
from sqlalchemy import create_engine

from penstock.models import store
from penstock.store.schema import metadata
from tests.postgres_server import running_postgres

# Before anything imports Triton, as transformers does: it chooses its interpreter once (tests/triton_device.py).
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The same examples each time, so that a commit's result is the commit's. New ones: --hypothesis-profile=explore.
# Nor is it the machine's: a slow one is no failure.
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", derandomize=False, print_blob=True)
settings.load_profile("same")


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


@pytest.fixture(scope="session", autouse=True)
def shared_certificates() -> Iterator[None]:
    """Read once which certificates the machine trusts: every client would, for 50 ms, and tests make thousands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", functools.cache(httpx.create_ssl_context))
        yield


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A real PostgreSQL; skips, saying so, where none is installed."""
    with running_postgres() as url:
        yield url


@pytest.fixture
def empty_postgres_url(postgres_url: str) -> str:
    engine = create_engine(postgres_url.replace("postgresql://", "postgresql+psycopg://"))
    metadata.drop_all(engine)
    engine.dispose()
    return postgres_url
