"""A wall clock that jumps by an hour, either way: nothing times out, nothing waits, only the stamps show it."""

import asyncio
import time

import httpx
import pytest

from tests.faults.caller import call, completion_body, tally
from tests.faults.conftest import DUMMY
from tests.server_process import ServerProcess, until

# Runs in every process of the server, because Python imports it at start.
JUMPING_CLOCK = """
import pathlib, time
_offset = pathlib.Path({offset!r})
_real = time.time
time.time = lambda: _real() + float(_offset.read_text())
"""


def created(server):
    body = completion_body(stream=False, max_tokens=1)
    headers = {"content-type": "application/json"}
    return httpx.post(f"{server.url}/v1/completions", content=body, headers=headers, timeout=30).json()["created"]


@pytest.mark.faults  # its short form is the rule that tests/architecture/test_clocks.py checks
async def test_jumps_of_the_wall_clock_change_nothing_but_stamps(model, tmp_path, monkeypatch):
    offset = tmp_path / "offset"
    offset.write_text("0")
    (tmp_path / "sitecustomize.py").write_text(JUMPING_CLOCK.format(offset=str(offset)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with ServerProcess(str(model), *DUMMY) as server:
        server.wait_ready()
        async with httpx.AsyncClient(base_url=server.url) as kept_open:
            await kept_open.get("/live")
            streams = [asyncio.create_task(call(server.url, completion_body(max_tokens=800))) for _ in range(2)]
            running = "penstock_total_running_requests"
            await asyncio.to_thread(until, lambda: server.metric(running) == 2, 20, "two running requests")
            for jump in (3600, -3600):
                offset.write_text(str(jump))
                assert abs(created(server) - time.time() - jump) < 60
                assert server.get("/ready")[0] == 200
                assert (await kept_open.get("/ready")).status_code == 200
            assert tally(await asyncio.gather(*streams)) == {"completed": 2}
        assert await asyncio.to_thread(server.stop) == 0
