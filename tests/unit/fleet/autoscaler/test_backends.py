"""Backends do what they are told: on a fake cluster, and with real processes that stand in for servers."""

import asyncio
import dataclasses
import os
import signal
import sys

import aiohttp
import pytest
from aiohttp import web

from penstock.errors import ConfigError, RemoteError
from penstock.fleet.adapters.interface import ServedModel
from penstock.fleet.autoscaler.backends import local
from penstock.fleet.autoscaler.backends.external import ExternalScale, ExternalSettings
from penstock.fleet.autoscaler.backends.interface import BackendContext
from penstock.fleet.autoscaler.backends.kubernetes import KubernetesScale, KubernetesSettings
from penstock.fleet.autoscaler.backends.local import LocalProcesses, LocalSettings
from penstock.fleet.config import HealthSection, ReplicaEntry
from penstock.fleet.replica import ReplicaPool
from penstock.stop_signals import OWNERS_SIGNAL
from tests.unit.fleet.conftest import FakeClock

PATH = "/apis/apps/v1/namespaces/models/deployments/penstock/scale"


@pytest.fixture
async def context():
    async with aiohttp.ClientSession() as session:
        yield BackendContext("tiny", ReplicaPool(HealthSection()), session)


class FakeCluster:
    """One deployment's scale."""

    def __init__(self):
        self.spec = {}
        self.asked = []

    async def answer(self, request):
        if request.path != PATH:
            return web.Response(status=404)
        self.asked.append((request.method, request.headers["authorization"], request.content_type))
        if request.method == "PATCH":
            self.spec = (await request.json())["spec"]
        return web.json_response({"kind": "Scale", "spec": self.spec})


@pytest.fixture
async def cluster(tmp_path, context):
    (tmp_path / "token").write_text("pod-token\n")
    (tmp_path / "namespace").write_text("models")
    fake = FakeCluster()
    app = web.Application()
    app.router.add_route("*", "/{path:.+}", fake.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()

    def backend(deployment="penstock"):
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return KubernetesScale(KubernetesSettings(deployment=deployment), context, account=tmp_path, api=url)

    yield fake, backend
    await runner.cleanup()


async def test_a_deployments_scale_is_written_with_the_pods_token(cluster):
    fake, make = cluster
    backend = make()
    assert await backend.count() == 0
    await backend.scale_to(3)
    assert fake.spec == {"replicas": 3}
    assert fake.asked[-1] == ("PATCH", "Bearer pod-token", "application/merge-patch+json")
    assert await backend.count() == 3


async def test_a_scale_that_is_right_already_is_not_written(cluster):
    fake, make = cluster
    fake.spec = {"replicas": 2}
    await make().scale_to(2)
    assert [method for method, *_ in fake.asked] == ["GET"]


async def test_a_deployment_that_is_not_there_is_said(cluster):
    _, make = cluster
    with pytest.raises(RemoteError, match="404"):
        await make(deployment="other").scale_to(1)


async def test_outside_a_pod_kubernetes_says_so(context, monkeypatch, tmp_path):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="inside a Kubernetes pod"):
        KubernetesScale(KubernetesSettings(deployment="x"), context, account=tmp_path)


async def test_what_others_scale_is_counted_and_left_alone(context):
    backend = ExternalScale(ExternalSettings(), context)
    replica = context.pool.add("test", ReplicaEntry(url="http://replica-1:80"))
    replica.models = (ServedModel("tiny"),)
    await backend.scale_to(5)
    assert await backend.count() == 1


async def test_of_what_others_scale_a_candidate_is_not_counted(context):
    context = dataclasses.replace(context, version="a")
    backend = ExternalScale(ExternalSettings(), context)
    for version in ("a", "b"):
        replica = context.pool.add("test", ReplicaEntry(url=f"http://replica-{version}:80", version=version))
        replica.models = (ServedModel("tiny"),)
        assert backend.owns(replica) == (version == "a")
    assert await backend.count() == 1


# Stands in for `penstock serve`: says that it is ready, and ends when told to.
SERVER = """
import http.server, sys

class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Ready).serve_forever()
"""


@pytest.fixture
def started(monkeypatch):
    """Have processes started that do nothing, and remember how."""
    seen = []
    create = asyncio.create_subprocess_exec

    async def start(*command, env, **options):
        assert command[:3] == (sys.executable, "-m", "penstock.leash")
        seen.append((list(command[6:]), env))
        return await create(sys.executable, "-c", SERVER, command[-1], env=env, **options)

    monkeypatch.setattr(local.asyncio, "create_subprocess_exec", start)
    return seen


@pytest.fixture
async def processes(context, started):
    made = []

    def make(**settings):
        made.append(LocalProcesses(LocalSettings(serve=("tiny", "--device", "simulated"), **settings), context))
        return made[-1]

    yield make
    for backend in made:
        await backend.close()


async def until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition never came true")


async def scaled(backend, context, count):
    """Have so many, and wait until they are ready."""
    await backend.scale_to(count)
    await until(lambda: len(context.pool) == count)


async def test_processes_are_started_and_told_to_the_pool(processes, context, started):
    backend = processes(key_file="/key")
    await backend.scale_to(2)
    assert await backend.count() == 2
    assert len(context.pool) == 0  # none is ready yet
    await until(lambda: len(context.pool) == 2)
    urls = sorted(
        (replica.url for replica in context.pool),
        key=[f"http://127.0.0.1:{command[-1]}" for command, _ in started].index,
    )
    for url, (command, _) in zip(urls, started, strict=True):
        port = url.rpartition(":")[2]
        assert command == ["serve", "tiny", "--device", "simulated", "--host", "127.0.0.1", "--port", port]
    assert {replica.entry.key_file for replica in context.pool} == {"/key"}


async def test_only_the_processes_of_a_backend_are_its_own(processes, context):
    backend = processes()
    await scaled(backend, context, 1)
    (mine,) = context.pool
    other = context.pool.add("test", ReplicaEntry(url="http://replica-1:80"))
    assert (backend.owns(mine), backend.owns(other)) == (True, False)


async def test_processes_have_the_version_that_the_fleet_calls_stable(started, context):
    backend = LocalProcesses(LocalSettings(serve=("tiny",)), dataclasses.replace(context, version="a"))
    await scaled(backend, context, 1)
    assert [replica.version for replica in context.pool] == ["a"]
    await backend.close()


async def test_a_server_that_does_not_take_the_gateways_key_is_trouble_and_gets_no_company(processes, context):
    backend = processes()
    await scaled(backend, context, 1)
    (replica,) = context.pool
    replica.breaker.on_probe(False, "/v1/models answers 401: give key_file")
    await backend.scale_to(2)
    assert await backend.count() == 1
    assert str(backend.trouble) == (
        "a server that was started does not tell this gateway what it serves: "
        "autoscaler.tiny.backend: /v1/models answers 401: give key_file"
    )
    replica.models = (ServedModel("tiny"),)
    replica.breaker.on_probe(True)
    await backend.scale_to(1)
    assert backend.trouble is None


async def test_a_server_that_serves_another_model_is_trouble(processes, context):
    backend = processes()
    await scaled(backend, context, 1)
    (replica,) = context.pool
    replica.models = (ServedModel("other"),)
    replica.breaker.on_probe(True)
    await backend.scale_to(1)
    assert backend.trouble.summary == "a server that was started serves another model"
    assert backend.trouble.detail == "it serves other, not tiny: give --served-name tiny in `serve`"


async def test_whoever_is_named_leaves_first_and_then_the_newest(processes, context):
    backend = processes()
    await scaled(backend, context, 3)
    first, second, third = [child.url for child in backend._children]
    await backend.scale_to(2, [first])
    assert {replica.url for replica in context.pool} == {second, third}
    await backend.scale_to(1)
    assert [replica.url for replica in context.pool] == [second]


async def test_a_replica_with_requests_ends_only_after_them(processes, context):
    backend = processes()
    await scaled(backend, context, 1)
    (replica,) = context.pool
    replica.num_in_flight = 1
    (child,) = backend._children
    await backend.scale_to(0)
    await asyncio.sleep(0.2)
    assert replica.is_leaving
    assert child.process.returncode is None
    replica.num_in_flight = 0
    assert await asyncio.wait_for(child.process.wait(), 10) == -OWNERS_SIGNAL


async def kill(backend):
    """Have the newest process die."""
    child = backend._children[-1]
    child.process.kill()
    await child.process.wait()
    return child


async def test_a_process_that_died_after_a_good_while_is_replaced_at_once(processes, context):
    clock = context.pool.clock = FakeClock()
    backend = processes()
    await scaled(backend, context, 1)
    clock.now += 60.0
    child = await kill(backend)
    await scaled(backend, context, 1)
    (after,) = context.pool
    assert after.url != child.url
    assert await backend.count() == 1


async def test_a_process_that_hangs_is_killed_and_replaced(processes, context):
    clock = context.pool.clock = FakeClock()
    backend = processes()
    await scaled(backend, context, 1)
    (replica,) = context.pool
    (child,) = backend._children
    child.process.send_signal(signal.SIGSTOP)
    replica.breaker.on_failure("it did not answer in time", is_fatal=True)
    clock.now += 59.0
    replica.breaker.on_failure("it did not answer in time")
    await backend.scale_to(1)
    assert list(context.pool) == [replica]
    clock.now += 1.0
    await backend.scale_to(1)
    assert child.process.returncode == -signal.SIGKILL
    await until(lambda: [item.url for item in context.pool] not in ([], [replica.url]))


async def test_a_process_that_hangs_when_it_is_to_end_is_killed(processes, context, monkeypatch):
    monkeypatch.setattr(local, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(local, "_READY_TIMEOUT", aiohttp.ClientTimeout(total=0.05))
    clock = context.pool.clock = FakeClock()
    backend = processes()
    await scaled(backend, context, 1)
    (child,) = backend._children
    child.process.send_signal(signal.SIGSTOP)
    # On a busy machine it may not have stopped yet, and would take the signal to end first.
    await asyncio.to_thread(os.waitid, os.P_PID, child.process.pid, os.WSTOPPED | os.WNOWAIT)
    await backend.scale_to(0)
    await asyncio.sleep(0.2)
    assert child.process.returncode is None
    clock.now += 60.0
    await until(lambda: child.process.returncode == -signal.SIGKILL)


@pytest.fixture
def failing(monkeypatch, context):
    """Have processes started that end at once, while a fake clock says what time it is."""
    clock = context.pool.clock = FakeClock()
    started, create = [], asyncio.create_subprocess_exec
    words = "import sys; sys.exit('first\\n\\nno model is called tinny')"

    async def start(*command, **options):
        process = await create(sys.executable, "-c", words if clock.is_bad else SERVER, command[-1], **options)
        started.append(process)
        return process

    clock.is_bad = True
    monkeypatch.setattr(local.asyncio, "create_subprocess_exec", start)
    return clock, started


async def moments_of_starts(backend, clock, started, seconds, count=1):
    """Let so many seconds pass, and return when something was started in them."""
    moments = []
    for _ in range(seconds):
        before = len(started)
        await backend.scale_to(count)
        moments += [clock.now] * (len(started) - before)
        await asyncio.gather(*[process.wait() for process in started if clock.is_bad])
        clock.now += 1.0
    return moments


async def test_what_cannot_start_is_tried_again_after_ever_longer_pauses(context, failing):
    clock, started = failing
    backend = LocalProcesses(LocalSettings(serve=("tinny",)), context)
    begin = clock.now
    moments = await moments_of_starts(backend, clock, started, 200)
    await backend.close()
    # A failure is seen a second after its start, and then 1, 2, 4, … at most 60 seconds pass.
    assert [moment - begin for moment in moments] == [0, 2, 5, 10, 19, 36, 69, 130, 191]


async def pauses_before(backend, clock, count, seconds):
    """Whether what just died is replaced only after so many seconds."""
    await backend.scale_to(count)
    clock.now += seconds - 0.5
    await backend.scale_to(count)
    has_paused = await backend.count() < count
    clock.now += 0.5
    return has_paused


async def test_what_is_ready_and_dies_soon_after_is_started_again_after_ever_longer_pauses(context, failing):
    clock, _ = failing
    clock.is_bad = False
    backend = LocalProcesses(LocalSettings(serve=("tiny",)), context)
    for pause in (1.0, 2.0, 4.0):
        await scaled(backend, context, 1)
        clock.now += 59.0
        await kill(backend)
        assert await pauses_before(backend, clock, 1, pause)
    assert str(backend.trouble).startswith("a server that was started ended with status -9 soon after it was ready")
    await scaled(backend, context, 1)
    clock.now += 60.0
    await kill(backend)
    await scaled(backend, context, 1)  # at once: it had been well for a while
    assert backend.num_failed_starts == 3
    await kill(backend)
    assert await pauses_before(backend, clock, 1, 1.0)
    await scaled(backend, context, 1)
    await backend.close()


async def test_one_that_is_well_does_not_hide_that_another_dies_again_and_again(context, failing):
    clock, _ = failing
    clock.is_bad = False
    backend = LocalProcesses(LocalSettings(serve=("tiny",)), context)
    await scaled(backend, context, 1)
    clock.now += 600.0
    for pause in (1.0, 2.0, 4.0):
        await scaled(backend, context, 2)
        await kill(backend)
        assert await pauses_before(backend, clock, 2, pause)
    await backend.close()


async def test_what_a_process_said_before_it_ended_is_told(context, failing, capsys):
    clock, started = failing
    backend = LocalProcesses(LocalSettings(serve=("tinny",)), context)
    await moments_of_starts(backend, clock, started, 2)
    assert backend.trouble.summary == "a server that was started ended with status 1 before it was ready"
    assert backend.trouble.detail == "first\nno model is called tinny"
    assert "no model is called tinny\n" in capsys.readouterr().err  # whoever reads the gateway's sees it too
    await backend.close()


async def test_after_a_failure_one_is_tried_at_a_time_until_one_is_ready(context, failing):
    clock, started = failing
    backend = LocalProcesses(LocalSettings(serve=("tinny",)), context)
    assert len(await moments_of_starts(backend, clock, started, 1, count=3)) == 3
    clock.is_bad = False
    assert len(await moments_of_starts(backend, clock, started, 4, count=3)) == 1
    await until(lambda: len(context.pool) == 1)
    assert backend.trouble is None
    assert len(await moments_of_starts(backend, clock, started, 1, count=3)) == 2
    await backend.close()


async def test_each_process_has_a_device_of_its_own_while_there_are_some(processes, started):
    backend = processes(devices=("0", "1"))
    with pytest.raises(RemoteError, match="all 2 devices are in use"):
        await backend.scale_to(3)
    assert [environment["CUDA_VISIBLE_DEVICES"] for _, environment in started] == ["0", "1"]
    assert await backend.count() == 2


async def test_a_replica_that_is_not_wanted_any_more_ends_before_it_is_ready(processes, context):
    backend = processes()
    await backend.scale_to(1)
    (child,) = backend._children
    await backend.scale_to(0)
    assert await asyncio.wait_for(child.process.wait(), 10) == -OWNERS_SIGNAL
    assert len(context.pool) == 0


async def test_closing_ends_every_process(processes, context):
    backend = processes()
    await backend.scale_to(2)
    children = [child.process for child in backend._children]
    await backend.close()
    assert [process.returncode for process in children] == [-OWNERS_SIGNAL] * 2
    assert len(context.pool) == 0
