"""Files and batches through the gateway, before scripted servers."""

import asyncio

import aiohttp
import msgspec
import pytest
from aiohttp import web

from penstock.connection_limits import ConnectionLimits
from tests.fakes.fake_replica import FakeReplica
from tests.unit.fleet.conftest import QUICK, running_gateway

HEADERS = {"content-type": "application/json"}


def files_of(*, missing=False, status=200):
    """Answer what a replica answers for files and batches; `missing`: it does not serve the batch's model."""

    async def answer(replica, request):
        replica.received.append({"method": request.method, "path": request.path_qs, "body": await request.read()})
        if missing:
            return web.json_response({"error": {"message": "no", "code": "model_not_found"}}, status=404)
        return web.json_response({"id": "x"}, status=status)

    return answer


async def test_everything_of_files_and_batches_reaches_a_replica_as_it_was_sent():
    async with FakeReplica(files=files_of()).running() as one, running_gateway(one) as running:
        sent = [
            ("POST", "/v1/files", b"x" * 100_000),  # larger than other bodies may be
            ("GET", "/v1/files?limit=3&after=a", b""),
            ("GET", "/v1/files/file-1/content", b""),
            ("DELETE", "/v1/files/file-1", b""),
            ("POST", "/v1/batches", b"{}"),
            ("POST", "/v1/batches/batch_1/cancel", b""),
        ]
        for method, path, body in sent:
            answer = await running.client.request(method, running.url + path, data=body, headers=HEADERS)
            assert (answer.status, await answer.json()) == (200, {"id": "x"})
        assert [(item["method"], item["path"], item["body"]) for item in one.received] == sent


async def test_an_upload_that_its_replica_finds_too_large_is_refused_before_all_of_it_is_sent():
    async def refuse(replica, request):
        assert request.content_length == 10**9
        return web.json_response({"error": {"code": "body_too_large"}}, status=413)

    async with FakeReplica(files=refuse).running() as one, running_gateway(one) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
        writer.write(b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\r\n" + b"x" * 1000)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert b" 413 " in head and b"connection: close" in head.lower()
        writer.close()
        await writer.wait_closed()


SLOW = ConnectionLimits(body_seconds=0.2, body_bytes_per_second=1024 * 1024)


@pytest.mark.parametrize("rest", [b"", b"no chunk\r\n"])
async def test_uploads_that_stop_or_are_none_are_not_held_against_their_replica(rest):
    async with FakeReplica(files=files_of()).running() as one, running_gateway(one, limits=SLOW) as running:
        breaker = running.gateway.pool.find(one.url).breaker
        failures = []
        breaker.on_failure = lambda reason, **_: failures.append(reason)

        async def upload():
            reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
            head = b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
            writer.write(head + b"1\r\nx\r\n" + rest)
            await asyncio.wait_for(reader.read(), 5)
            writer.close()

        await asyncio.gather(*[upload() for _ in range(4)], return_exceptions=True)
        answer = await running.client.post(f"{running.url}/v1/files", data=b"x", headers=HEADERS)
        assert answer.status == 200 and not failures and breaker.standing == "ready"


async def test_an_upload_may_take_longer_than_a_replica_may_be_silent():
    health = msgspec.structs.replace(QUICK.health, silence_seconds=1.0)

    async def slowly():
        for _ in range(4):
            await asyncio.sleep(0.4)
            yield b"x" * 1000

    config = msgspec.structs.replace(QUICK, health=health)
    async with FakeReplica(files=files_of()).running() as one, running_gateway(one, config=config) as running:
        answer = await running.client.post(f"{running.url}/v1/files", data=slowly(), headers=HEADERS)
        assert answer.status == 200 and len(one.received[0]["body"]) == 4000


async def test_an_answer_that_drips_is_cut_and_held_against_its_replica():
    async def drip(replica, request):
        response = web.StreamResponse(headers={"content-length": "1000000"})
        await response.prepare(request)
        while True:
            await response.write(b"x")
            await asyncio.sleep(0.02)

    async with FakeReplica(files=drip).running() as one, running_gateway(one, limits=SLOW) as running:
        failures = []
        running.gateway.pool.find(one.url).breaker.on_failure = lambda reason, **_: failures.append(reason)
        answer = await running.client.get(f"{running.url}/v1/files/file-1/content")
        with pytest.raises(aiohttp.ClientError):
            await answer.read()
        assert failures == ["it did not answer in time"]


async def test_a_head_that_drips_does_not_prolong_the_wait():
    async def drip(replica, request):
        request.transport.write(b"HTTP/1.1 200 OK\r\nx: ")
        for _ in range(200):
            request.transport.write(b"x")
            await asyncio.sleep(0.02)

    config = msgspec.structs.replace(QUICK, health=msgspec.structs.replace(QUICK.health, silence_seconds=0.1))
    async with FakeReplica(files=drip).running() as one, running_gateway(one, config=config) as running:
        assert (await running.client.delete(f"{running.url}/v1/files/file-1")).status == 500


async def test_a_batch_reaches_a_replica_of_its_model():
    async with (
        FakeReplica(models=("a",), files=files_of(missing=True)).running() as one,
        FakeReplica(models=("b",), files=files_of()).running() as other,
        running_gateway(one, other) as running,
    ):
        for _ in range(2):
            answer = await running.client.post(f"{running.url}/v1/batches", data=b"{}", headers=HEADERS)
            assert answer.status == 200
        other.files = files_of(missing=True)
        answer = await running.client.post(f"{running.url}/v1/batches", data=b"{}", headers=HEADERS)
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(("method", "tries"), [("GET", 2), ("POST", 1), ("DELETE", 1)])
async def test_only_what_changes_nothing_is_tried_again(method, tries):
    async with (
        FakeReplica(files=files_of(status=503)).running() as one,
        FakeReplica(files=files_of(status=503)).running() as other,
        running_gateway(one, other) as running,
    ):
        answer = await running.client.request(method, f"{running.url}/v1/batches/batch_1", data=b"", headers=HEADERS)
        assert answer.status == 503
        assert len(one.received) + len(other.received) == tries


async def test_a_dead_replica_is_passed_over():
    dead = FakeReplica(files=files_of())
    async with dead.running():
        pass  # only to have a port, which is closed now
    async with FakeReplica(files=files_of()).running() as good, running_gateway(dead, good) as running:
        running.gateway.pool.find(dead.url).models = ()
        for _ in range(3):
            answer = await running.client.post(f"{running.url}/v1/files", data=b"x", headers=HEADERS)
            assert answer.status == 200


async def test_foreign_servers_have_none_and_that_is_said():
    async with FakeReplica().running() as one, running_gateway(one, kind="vllm") as running:
        answer = await running.client.get(f"{running.url}/v1/files")
        document = await answer.json()
        assert (answer.status, document["error"]["code"]) == (404, "route_not_found")
        assert "Penstock replica" in document["error"]["message"]
        assert not one.received


async def test_without_a_replica_that_is_up_it_is_503():
    async with FakeReplica(ready=503).running() as one, running_gateway(one) as running:
        assert (await running.client.get(f"{running.url}/v1/files")).status == 503
