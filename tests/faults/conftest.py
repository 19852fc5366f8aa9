"""Servers that fault tests share, and how exact the clock is held to what docs/promises.md says."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server_process import ServerProcess, until, write_tiny_model

DUMMY = ("--load-format", "dummy", "--kv-memory", "64MiB", "--log-format", "json")


@pytest.fixture(scope="session")
def patience(request: pytest.FixtureRequest) -> float:
    """How many times the promised seconds a test allows: `make faults` holds to the letter, a busy CI to the word."""
    return 5.0 if "not faults" in request.config.option.markexpr else 1.0


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def server_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="session")
def running_server(model: Path, server_folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(str(model), *DUMMY, folder=server_folder) as running:
        yield running.wait_ready()


@pytest.fixture
def server(running_server: ServerProcess) -> ServerProcess:
    """A server that is ready, whatever the test before did to it."""
    until(lambda: running_server.get("/ready")[0] == 200 and is_idle(running_server), 60, "readiness")
    return running_server


@pytest.fixture(scope="module")
def faulty_server(model: Path) -> Iterator[ServerProcess]:
    with ServerProcess(str(model), *DUMMY, module="tests.faults.faulty_server") as running:
        yield running.wait_ready()


def is_idle(server: ServerProcess) -> bool:
    """Whether nothing runs, waits or holds a block."""
    names = ("penstock_total_running_requests", "penstock_total_queued_requests", "penstock_kv_blocks_used")
    return server.metrics(*names) == [0, 0, 0]
