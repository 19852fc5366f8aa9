"""Going on for long: memory and files stay as they are, and every request ends in exactly one way."""

import pytest

from tests.faults.soak import SOAK_FLAGS, killing, steady
from tests.server_process import ServerProcess


@pytest.mark.parametrize("num_kills", [2, pytest.param(40, marks=[pytest.mark.faults, pytest.mark.timeout(1200)])])
async def test_every_request_ends_once_while_processes_are_killed(server, num_kills):
    ledger = await killing(server, num_kills)
    print(dict(ledger))
    assert ledger["completed"] > 0
    assert set(ledger) <= {"completed", "error", "connection_error"}


@pytest.mark.faults
@pytest.mark.timeout(1200)
async def test_ten_minutes_of_load_leave_memory_and_files_as_they_were(model):
    with ServerProcess(str(model), *SOAK_FLAGS) as server:
        report = await steady(server.wait_ready(), 600)
    print(report)
    assert report.kb_per_request <= 0.1
    assert report.num_files_last <= report.num_files_first + 8
    assert set(report.outcomes) == {"completed", "error", "left"}
