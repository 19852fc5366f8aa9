"""The scale backend of Ray Serve, against a fake of its dashboard's REST API."""

import aiohttp
import pytest
from aiohttp import web

from penstock.errors import RemoteError
from penstock.fleet.autoscaler.backends.interface import BackendContext
from penstock.fleet.autoscaler.backends.ray import RayScale, RaySettings
from penstock.fleet.autoscaler.backends.registry import BACKENDS
from penstock.fleet.config import HealthSection
from penstock.fleet.replica import ReplicaPool


@pytest.fixture
async def dashboard():
    """Numbers by deployment, as the dashboard would tell and set them."""
    numbers = {"replica": 1}

    async def tell(request):
        deployments = {name: {"target_num_replicas": number} for name, number in numbers.items()}
        return web.json_response({"applications": {"penstock": {"deployments": deployments}}, "proxies": {}})

    async def scale(request):
        if request.match_info["application"] != "penstock":
            return web.json_response({"error": "not found"}, status=400)
        numbers[request.match_info["deployment"]] = (await request.json())["target_num_replicas"]
        return web.json_response({"message": "received"})

    app = web.Application()
    app.router.add_get("/api/serve/applications/", tell)
    app.router.add_post("/api/v1/applications/{application}/deployments/{deployment}/scale", scale)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    yield f"http://{host}:{port}"
    await runner.cleanup()


@pytest.fixture
async def make_scale(dashboard):
    async with aiohttp.ClientSession() as session:

        def make(**settings):
            context = BackendContext("tiny", ReplicaPool(HealthSection()), session)
            return RayScale(RaySettings(**{"dashboard": dashboard, **settings}), context)

        yield make


async def test_the_number_asked_for_is_the_number_there_will_be(make_scale):
    backend = make_scale()
    assert await backend.count() == 1
    await backend.scale_to(3)
    assert await backend.count() == 3


async def test_an_application_that_is_not_there_is_said(make_scale):
    backend = make_scale(application="other")
    with pytest.raises(RemoteError, match="runs no application 'other'"):
        await backend.count()
    with pytest.raises(RemoteError, match="answers 400"):
        await backend.scale_to(2)


async def test_a_dashboard_that_is_not_there_is_said(make_scale):
    with pytest.raises(RemoteError, match="cannot be asked"):
        await make_scale(dashboard="http://127.0.0.1:9").count()


def test_it_can_be_named():
    assert BACKENDS.load("ray") is RayScale
