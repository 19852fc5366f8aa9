"""/live says that the process runs; /ready that work sent now would be done."""

import time

import pytest

from penstock.engine.messages import EngineStats
from penstock.protocol.identity import IDENTITY_HEADER, Identity, decode_identity
from tests.unit.server.conftest import running_service


async def not_ready(service, code="not_ready"):
    response = await service.client.get("/ready")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == code
    return response.json()["error"]["message"]


async def test_a_running_process_is_live_whatever_the_engine_does(service):
    service.engine.info, service.engine.connected = None, False
    assert (await service.client.get("/live")).json() == {"status": "live"}


async def test_a_connected_engine_that_speaks_is_ready(service):
    assert (await service.client.get("/ready")).json() == {"status": "ready"}


async def test_a_ready_server_tells_gateways_which_store_it_counts_in(service, tmp_path):
    told = (await service.client.get("/ready")).headers[IDENTITY_HEADER]
    assert decode_identity(told) == Identity("server", store=None, has_keys=False)
    async with running_service(store=str(tmp_path / "s.db"), needs_keys=True) as other:
        told = (await other.client.get("/ready")).headers[IDENTITY_HEADER]
        store = other.context.tenancy.store_identity
        assert decode_identity(told) == Identity("server", store=store, has_keys=True)


async def test_a_starting_engine_is_not_ready(service):
    service.engine.info = None
    assert "starting" in await not_ready(service)


async def test_a_restarting_engine_is_not_ready(service):
    service.engine.connected = False
    assert "restarting" in await not_ready(service)


async def test_a_silent_engine_is_not_ready(service):
    service.engine.stats_age_seconds = 6.5
    assert "6.5 s" in await not_ready(service, "engine_stalled")


async def test_a_busy_engine_may_be_silent_for_the_length_of_a_step(service):
    service.engine.stats = EngineStats(num_running=1)
    service.engine.stats_age_seconds = 6.5
    assert (await service.client.get("/ready")).status_code == 200
    service.engine.stats_age_seconds = 31.0
    assert "31.0 s" in await not_ready(service, "engine_stalled")


async def test_an_engine_process_that_stands_still_is_not_ready_whatever_it_was_doing(service):
    service.engine.stats = EngineStats(num_running=1)
    service.engine.pulse_age_seconds = 1.5
    assert (await service.client.get("/ready")).status_code == 200
    service.engine.pulse_age_seconds = 2.5
    assert "2.5 s" in await not_ready(service, "engine_stalled")


async def test_an_engine_that_knows_of_a_fault_is_not_ready(service):
    service.engine.stats = EngineStats(fault="a block of the KV cache changed")
    assert await not_ready(service) == "a block of the KV cache changed"


async def test_a_draining_server_is_not_ready(service):
    service.context.answers.draining = True
    assert "draining" in await not_ready(service)


@pytest.fixture
def clock(monkeypatch):
    """Return a function that moves the monotonic clock on."""
    shift = 0.0
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + shift)

    def advance(seconds):
        nonlocal shift
        shift += seconds

    return advance


async def test_an_engine_with_work_and_no_step_is_not_ready(service, clock):
    service.engine.stats = EngineStats(num_running=1, num_steps=7)
    assert (await service.client.get("/ready")).status_code == 200
    clock(31)
    assert "no step" in await not_ready(service, "engine_stalled")
    service.engine.stats = EngineStats(num_running=1, num_steps=8)
    assert (await service.client.get("/ready")).status_code == 200


async def test_an_idle_engine_needs_no_steps(service, clock):
    service.engine.stats = EngineStats(num_running=0, num_steps=7)
    for _ in range(3):
        assert (await service.client.get("/ready")).status_code == 200
        clock(100)


async def test_work_after_a_long_rest_is_not_a_hang(service, clock):
    for num_running, num_steps in ((0, 0), (1, 0), (1, 3), (0, 4), (1, 4)):
        service.engine.stats = EngineStats(num_running=num_running, num_steps=num_steps)
        assert (await service.client.get("/ready")).status_code == 200
        clock(1000)
