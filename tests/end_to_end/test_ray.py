"""`penstock deploy ray` on a real Ray cluster of two nodes, and our gateway in front of it.

Needs Ray (`pip install 'penstock[ray]'`), some 2 GB of memory and minutes.
"""

import asyncio
import contextlib
import re
import threading
import warnings

import aiohttp
import httpx
import pytest

from penstock.fleet.autoscaler.backends.interface import BackendContext
from penstock.fleet.autoscaler.backends.ray import RayScale, RaySettings
from penstock.fleet.config import HealthSection
from penstock.fleet.replica import ReplicaPool
from tests.fakes.gateway_process import MODEL, GatewayProcess, write_simulated_model
from tests.server_process import until
from tests.unit.server.sse import events_in, text_of

# Ray's own code warns of much.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

BODY = {"model": MODEL, "prompt": [5, 6, 7], "temperature": 0, "ignore_eos": True, "max_tokens": 8}
FLEET = """
[discovery]
ray = [{{ address = "{address}", application = "{application}", refresh_seconds = 0.5 }}]

[models.{model}]
policy = "round-robin"

[queue]
hold_seconds = 60.0
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_simulated_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def cluster():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("ray.serve", reason="Ray is not installed: pip install 'penstock[ray]'")
        from tests.fakes.ray_cluster import RayCluster
    with RayCluster() as running:
        yield running


@pytest.fixture(scope="module")
def driver(cluster):
    """This process as a part of the cluster."""
    import ray

    ray.init(address=cluster.address, namespace="penstock", log_to_driver=False)
    yield ray
    ray.shutdown()


@contextlib.contextmanager
def gateway_of(cluster, folder, application):
    file = folder / "fleet.toml"
    file.write_text(FLEET.format(address=cluster.address, application=application, model=MODEL))
    with GatewayProcess("--fleet", str(file)) as gateway:
        yield gateway.wait_ready()


@pytest.fixture(scope="module")
def fleet(cluster, model, tmp_path_factory):
    """Two replicas, one on each node, and a gateway that found them."""
    from tests.fakes.ray_cluster import simulated_options

    options = [*simulated_options(model, "4"), "--host", "127.0.0.1"]
    printed = cluster.deploy(*options, "--replicas", "2", "--name", "fleet")
    assert 'application = "fleet"' in printed
    with gateway_of(cluster, tmp_path_factory.mktemp("gateway"), "fleet") as gateway:
        yield gateway
    cluster.deploy("--remove", "--name", "fleet")


def ask(url, **fields):
    response = httpx.post(f"{url}/v1/completions", json={**BODY, **fields}, timeout=60)
    assert response.status_code == 200, response.text
    return response


def replicas_seen(gateway, count=6):
    routes = [ask(gateway.url).headers["x-penstock-route"] for _ in range(count)]
    return {re.search(r"replica=([^;]+)", route)[1] for route in routes}


class Streams:
    """Requests with long answers, read in threads."""

    def __init__(self, gateway, count, max_tokens):
        self.received = [b""] * count
        self._url, self._max_tokens = f"{gateway.url}/v1/completions", max_tokens
        self._threads = [threading.Thread(target=self._read, args=(place,)) for place in range(count)]
        for thread in self._threads:
            thread.start()
        until(lambda: all(data.count(b"data: ") > 5 for data in self.received), 30, "the streams' beginning")

    def _read(self, place):
        body = {**BODY, "max_tokens": self._max_tokens, "stream": True}
        with httpx.stream("POST", self._url, json=body, timeout=120) as response:
            for data in response.iter_raw():
                self.received[place] += data

    def texts(self):
        for thread in self._threads:
            thread.join(120)
        events = [events_in(data) for data in self.received]
        assert all(item[-1] == "[DONE]" for item in events)
        return {text_of(item) for item in events}


def expected_text(gateway, max_tokens):
    return ask(gateway.url, max_tokens=max_tokens).json()["choices"][0]["text"]


async def scale(cluster, count):
    async with aiohttp.ClientSession() as session:
        context = BackendContext(MODEL, ReplicaPool(HealthSection()), session)
        backend = RayScale(RaySettings(dashboard=cluster.dashboard, application="fleet"), context)
        await backend.scale_to(count)
        return await backend.count()


def test_the_gateway_finds_a_replica_on_each_node_and_asks_them_itself(fleet):
    until(lambda: len(replicas_seen(fleet)) == 2, 30, "both replicas")
    assert ask(fleet.url).json()["usage"]["completion_tokens"] == 8


def test_the_directory_is_in_no_replicas_placement_group(driver, fleet):
    from ray.util.state import list_actors

    (directory,) = list_actors(filters=[("name", "=", "directory:fleet")], detail=True)
    assert directory.state == "ALIVE"
    assert directory.placement_group_id is None, "it would end with the replica that made it"


def test_scaling_down_cuts_no_stream_and_scaling_up_brings_a_replica(cluster, fleet):
    streams = Streams(fleet, 2, 150)
    assert asyncio.run(scale(cluster, 1)) == 1
    assert streams.texts() == {expected_text(fleet, 150)}
    until(lambda: len(replicas_seen(fleet)) == 1, 60, "one replica")
    assert asyncio.run(scale(cluster, 2)) == 2
    until(lambda: len(replicas_seen(fleet)) == 2, 90, "two replicas again")


def test_when_a_node_is_killed_streams_go_on_and_the_replica_comes_back(cluster, fleet):
    until(lambda: len(replicas_seen(fleet)) == 2, 60, "both replicas")
    before = replicas_seen(fleet)
    streams = Streams(fleet, 4, 200)
    cluster.kill_node()
    assert len(replicas_seen(fleet)) >= 1
    assert streams.texts() == {expected_text(fleet, 200)}
    until(lambda: len(replicas_seen(fleet)) == 1, 60, "the dead replica to be let go of")
    cluster.add_node()
    until(lambda: len(replicas_seen(fleet)) == 2, 120, "the replica's return")
    assert len(replicas_seen(fleet) | before) == 3


def test_callers_of_ray_serve_reach_the_same_servers(fleet, driver):
    from ray import serve

    handle = serve.get_app_handle("fleet").options(stream=True)
    answers = [b"".join(handle.post.remote(BODY, "/v1/completions")) for _ in range(4)]
    texts = {httpx.Response(200, content=answer).json()["choices"][0]["text"] for answer in answers}
    assert texts == {expected_text(fleet, 8)}


def test_ranks_hold_the_devices_of_their_bundles(cluster, driver):
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from penstock.deploy.ray_serve.ranks import STRATEGY
    from tests.fakes.rank_claimer import RankClaimer

    bundles = [{"CPU": 1.0, "GPU": 1.0}] * 2
    cluster.add_node(num_cpus=2, num_gpus=2)
    group = placement_group(bundles, strategy=STRATEGY)
    try:
        where = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0)
        actor = driver.remote(RankClaimer).options(num_cpus=1, num_gpus=1, scheduling_strategy=where).remote()
        assert sorted(driver.get(actor.devices.remote(bundles), timeout=60)) == ["0", "1"]
    finally:
        remove_placement_group(group)


def test_our_controller_scales_behind_ray_serves_hook(cluster, driver, model, tmp_path):
    from penstock.deploy.ray_serve import application
    from penstock.deploy.ray_serve.settings import ApplicationSettings
    from tests.fakes.ray_cluster import simulated_replica

    scaling = {"policy": "queue-length", "requests_per_replica": 2, "scale_down_seconds": 2.0}
    replica = simulated_replica(model, "4", application="scaled", cpus_per_rank=0.1)
    application.start(ApplicationSettings(replica=replica, max_replicas=2, scaling=scaling))
    try:
        with gateway_of(cluster, tmp_path, "scaled") as gateway:
            assert len(replicas_seen(gateway, 2)) == 1
            streams = Streams(gateway, 4, 2000)
            until(lambda: len(replicas_seen(gateway)) == 2, 120, "a second replica")
            streams.texts()
            until(lambda: len(replicas_seen(gateway, 2)) == 1, 180, "one replica again")
    finally:
        application.remove("scaled")
