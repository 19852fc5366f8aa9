"""A server's places at its gateways: taken, kept and given back."""

import asyncio
import contextlib

import pytest
from aiohttp import web

from penstock.errors import ConfigError
from penstock.server.registration import Registrations, read_gateways


class FakeGateway:
    """Keeps who registered. `status` is what it answers."""

    def __init__(self) -> None:
        self.replicas: list[str] = []
        self.beats = 0
        self.keys: set[str | None] = set()
        self.status = 200

    async def _register(self, request):
        self.keys.add(request.headers.get("authorization"))
        if self.status == 200:
            self.beats += 1
            self.replicas = [(await request.json())["url"]]
        return web.json_response({"lease_seconds": 0.15}, status=self.status)

    async def _leave(self, request):
        self.replicas.remove(request.query["url"])
        return web.json_response({})

    @contextlib.asynccontextmanager
    async def running(self, path=None):
        """Listen on a port, or on a Unix socket; yield what `--gateway` names it by."""
        app = web.Application()
        app.router.add_post("/admin/replicas", self._register)
        app.router.add_delete("/admin/replicas", self._leave)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0) if path is None else web.UnixSite(runner, path)
        await site.start()
        try:
            yield f"unix:{path}" if path is not None else f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


@contextlib.asynccontextmanager
async def registered(*gateways, host="127.0.0.1", key=None):
    registrations = Registrations(gateways, host, 8000, key)
    task = asyncio.create_task(registrations.run())
    try:
        yield registrations
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition):
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition never came true")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_a_server_registers_keeps_its_lease_and_leaves(host, tmp_path):
    one, other = FakeGateway(), FakeGateway()
    async with (
        one.running() as url,
        other.running(str(tmp_path / "admin.sock")) as path,
        registered(url, path, host=host, key="secret") as registrations,
    ):
        await until(lambda: one.beats > 2 and other.beats > 2)
        assert one.replicas == other.replicas == ["http://127.0.0.1:8000"]
        assert one.keys == {"Bearer secret"}
        await registrations.leave()
        beats = one.beats
        await asyncio.sleep(0.2)
        assert (one.replicas, other.replicas, one.beats) == ([], [], beats)


@pytest.mark.parametrize(("status", "word"), [(401, "PENSTOCK_API_KEY"), (404, "unix:PATH"), (500, "its log")])
async def test_a_refusal_is_told_once_and_tried_again(status, word, caplog, monkeypatch):
    monkeypatch.setattr("penstock.server.registration._RETRY_SECONDS", 0.01)
    caplog.set_level("INFO")
    gateway = FakeGateway()
    gateway.status = status
    async with gateway.running() as url, registered(url):
        await until(lambda: any(word in record.getMessage() for record in caplog.records))
        await asyncio.sleep(0.1)
        assert sum(word in record.getMessage() for record in caplog.records) == 1
        gateway.status = 200
        await until(lambda: gateway.replicas)


async def test_a_gateway_that_is_not_there_holds_up_nothing():
    async with registered("http://127.0.0.1:9") as registrations:
        await asyncio.sleep(0.05)
        await asyncio.wait_for(registrations.leave(), 20)


@pytest.mark.parametrize(
    "text",
    ["", "gateway:8080", "ftp://a", "http://", "unix:", "http://a/b", "http://10.0.0.1:1", "http://[::1", "http://a:b"],
)
def test_what_names_no_gateway_that_could_reach_us_is_refused(text):
    with pytest.raises(ConfigError):
        read_gateways(text, "127.0.0.1")


def test_several_gateways_are_named_with_commas():
    named = "http://10.0.0.1:8080/, unix:/run/gateway.sock"
    assert read_gateways(named, "0.0.0.0") == ("http://10.0.0.1:8080", "unix:/run/gateway.sock")
