"""What of requests and answers passes through a gateway: which headers, how much, and how much of it is held."""

import asyncio

import aiohttp
import pytest
from aiohttp import web

from penstock.connection_limits import ConnectionLimits
from penstock.fleet.router import proxy
from penstock.metering.counts import StoreCounts
from penstock.metering.tenancy import Tenancy
from penstock.store.database import Database
from tests.fakes.fake_replica import FakeReplica
from tests.unit.fleet.conftest import running_gateway, until
from tests.unit.fleet.test_accounts import Settings, booked

PIECE = b"x" * 65536


@pytest.fixture
async def tenancy(tmp_path):
    tenancy = Tenancy(Settings(), StoreCounts(), Database.open(str(tmp_path / "s.db")))
    yield tenancy
    await tenancy.close()


def pouring(num_pieces, *, declares=False, pause_after=None, breaks=False):
    """Answer with so many pieces; wait for an event behind one of them; perhaps break off at the end."""
    goes_on = asyncio.Event()

    async def answer(replica, request, body):
        response = web.StreamResponse(headers={"content-type": "application/json"})
        if declares:
            response.content_length = num_pieces * len(PIECE)
        await response.prepare(request)
        for number in range(num_pieces):
            await response.write(PIECE)
            if number == pause_after:
                await goes_on.wait()
        if breaks:
            request.transport.close()
        return response

    return answer, goes_on


@pytest.mark.parametrize("status", [200, 503])
async def test_headers_pass_as_often_as_they_stand_but_for_those_of_one_connection(status):
    seen = []

    async def answer(replica, request, body):
        seen.extend(request.headers.items())
        response = web.json_response({"error": {"code": "engine_failed"}}, status=status)
        for name, value in (("set-cookie", "a=1"), ("set-cookie", "b=2"), ("x-hop", "1"), ("x-end", "1")):
            response.headers.add(name, value)
        response.headers["connection"] = "X-Hop, keep-alive"
        response.headers["keep-alive"] = "timeout=5"
        return response

    async with FakeReplica(answer=answer).running() as one, running_gateway(one) as running:
        given = [("x-many", "1"), ("x-many", "2"), ("x-secret", "1"), ("connection", "keep-alive, X-Secret")]
        body = {"model": "tiny"}
        response = await running.client.post(f"{running.url}/v1/completions", json=body, headers=given)
        assert response.status == status
        assert response.headers.getall("set-cookie") == ["a=1", "b=2"]
        assert response.headers["x-end"] == "1"
        assert not {"x-hop", "keep-alive"} & {name.lower() for name in response.headers}
    sent = [(name.lower(), value) for name, value in seen]
    assert [value for name, value in sent if name == "x-many"][:2] == ["1", "2"]
    assert "x-secret" not in dict(sent)


@pytest.mark.parametrize("declares", [True, False])
async def test_an_answer_too_large_to_be_held_is_passed_on_as_it_comes(declares):
    answer, goes_on = pouring(40, declares=declares, pause_after=30)
    async with FakeReplica(answer=answer).running() as one, running_gateway(one, kind="vllm") as running:
        response = await running.client.post(f"{running.url}/v1/completions", json={"model": "tiny"})
        begun = await response.content.readexactly(20 * len(PIECE))  # while the rest is yet to come
        goes_on.set()
        assert len(begun) + len(await response.read()) == 40 * len(PIECE)
        assert response.content_length == (40 * len(PIECE) if declares else None)


async def test_a_large_answer_that_breaks_off_is_not_taken_for_a_whole_one():
    answer, _ = pouring(40, breaks=True)
    async with FakeReplica(answer=answer).running() as one, running_gateway(one, kind="vllm") as running:
        with pytest.raises(aiohttp.ClientError):
            await running.ask()


@pytest.mark.parametrize("declares", [True, False])
async def test_an_answer_too_large_to_read_its_cost_is_502_and_ends_at_the_replica(tenancy, monkeypatch, declares):
    monkeypatch.setattr(proxy, "_READ_BYTES", 2 * len(PIECE))
    answer, _ = pouring(40, declares=declares, pause_after=20)
    left = asyncio.Event()

    async def watched(replica, request, body):
        try:
            return await answer(replica, request, body)
        finally:
            left.set()

    one = FakeReplica(answer=watched)
    async with one.running(), running_gateway(one, kind="vllm", tenancy=tenancy) as running:
        response = await running.ask()
        assert response.status == 502
        assert (await response.json())["error"]["code"] == "answer_too_large"
        await asyncio.wait_for(left.wait(), 5)
        assert len(one.received) == 1  # any other would answer the same
        await until(lambda: booked(tenancy) == (0, 0, 0, 0, 0, 1))


async def test_an_answer_that_drips_is_given_up():
    async def drip(replica, request, body):
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.02)

    one, limits = FakeReplica(answer=drip), ConnectionLimits(body_seconds=0.1)
    async with one.running(), running_gateway(one, limits=limits) as running:
        response = await running.ask()
        assert (response.status, (await response.json())["error"]["code"]) == (500, "engine_failed")


@pytest.mark.parametrize("status", [429, 503])
async def test_a_refusal_too_large_to_be_passed_on_is_told_in_our_words(status):
    async def refuse(replica, request, body):
        packed = {"content-encoding": "gzip", "retry-after": "0"}
        return web.Response(status=status, body=b"x" * 100_000, headers=packed, content_type="text/html")

    async with FakeReplica(answer=refuse).running() as one, running_gateway(one, kind="vllm") as running:
        response = await running.ask()
        assert response.status == status
        assert (await response.json())["error"]["code"] == "engine_failed"


async def test_what_a_caller_says_of_its_connection_takes_no_key_from_a_request():
    async with FakeReplica().running() as one, running_gateway(one) as running:
        given = {"authorization": "Bearer a", "connection": "keep-alive, Authorization, Content-Type"}
        assert (await running.ask(given)).status == 200
    assert one.headers[0]["authorization"] == "Bearer a"
    assert one.headers[0]["content-type"] == "application/json"
