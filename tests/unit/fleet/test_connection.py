"""Callers that are slow, silent or greedy: each is bounded, then cut, and the others are served."""

import asyncio
import contextlib
import hashlib
import json

import pytest
from aiohttp import web

from penstock.connection_limits import ConnectionLimits
from penstock.store.key_ring import KeyRing
from penstock.tenants import ApiKey, KeyTerms
from tests.fakes.fake_replica import FakeReplica
from tests.unit.fleet.conftest import running_gateway, until

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
LIVE = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"
BODY = b'{"model": "tiny", "stream": true}'


@contextlib.asynccontextmanager
async def limited(answer=None, **limits):
    replica = FakeReplica() if answer is None else FakeReplica(answer=answer)
    async with replica.running(), running_gateway(replica, limits=ConnectionLimits(**limits)) as running:
        yield running, replica


@contextlib.asynccontextmanager
async def connected(running):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]), limit=1024)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def error_code(answer):
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]


async def cuts(running, why):
    text = await (await running.client.get(f"{running.url}/metrics")).text()
    return f'penstock_gateway_connections_cut_total{{why="{why}"}} 1.0' in text


async def read_answer(reader):
    """Read one answer of a connection that stays open."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.lower().splitlines() if line.startswith(b"content-length"))
    return head + await reader.readexactly(length)


async def test_a_head_that_drips_is_answered_408_and_closed():
    async with limited(head_seconds=0.3) as (running, _), connected(running) as (reader, writer):
        writer.write(HEAD)
        answer = asyncio.create_task(read_answer(reader))
        while not answer.done():
            writer.write(b"x: y\r\n")
            await asyncio.sleep(0.12)
        assert (await answer).startswith(b"HTTP/1.1 408 ")
        assert error_code(await answer) == "request_timeout"
        with contextlib.suppress(ConnectionError):  # what is sent to who has closed resets the connection
            assert await asyncio.wait_for(reader.read(), 5) == b""
        assert await cuts(running, "head")


async def test_a_head_that_is_too_large_is_answered_431():
    async with limited(max_head_bytes=2000) as (running, _), connected(running) as (reader, writer):
        writer.write(HEAD + b"x: y\r\n" * 400)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert error_code(answer) == "head_too_large"
        assert await cuts(running, "head")


async def test_a_body_is_no_part_of_the_head_however_it_arrives():
    async with limited(max_head_bytes=200) as (running, replica), connected(running) as (reader, writer):
        body = json.dumps({"model": "tiny", "prompt": "x" * 3000}).encode()
        request = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
        for place in range(0, len(request), 37):
            writer.write(request[place : place + 37])
            await asyncio.sleep(0)
        assert b" 200 " in await reader.readline()
        assert len(replica.received) == 1


async def test_a_body_that_does_not_come_is_answered_408():
    async with limited(body_seconds=0.1) as (running, replica), connected(running) as (reader, writer):
        writer.write(HEAD + b"content-length: 40\r\n\r\n" + BODY[:10])
        assert b" 408 " in await reader.readline()
        assert not replica.received
        assert await cuts(running, "body")


async def test_a_body_that_drips_is_answered_408():
    async with limited(body_seconds=0.2) as (running, replica), connected(running) as (reader, writer):
        writer.write(HEAD + b"content-length: 4000\r\n\r\n")
        answer = asyncio.create_task(reader.readline())
        while not answer.done():
            writer.write(b" ")
            await asyncio.sleep(0.05)
        assert b" 408 " in await answer
        assert not replica.received


async def test_a_body_that_is_declared_too_large_is_refused_before_it_is_sent():
    async with limited() as (running, _), connected(running) as (reader, writer):
        writer.write(HEAD + b"expect: 100-continue\r\ncontent-length: 100000000\r\n\r\n")
        answer = await asyncio.wait_for(read_answer(reader), 5)  # and is not asked to be sent
        assert answer.startswith(b"HTTP/1.1 413 ") and b"connection: close" in answer.lower()
        assert error_code(answer) == "body_too_large"
        for _ in range(20):  # who sends it all the same gets no second answer for it
            writer.write(b"x" * 65536)
            await writer.drain()
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 5) == b""


@pytest.mark.parametrize("bound", [{"max_discarded_bytes": 1 << 20, "discard_seconds": 60.0}, {"discard_seconds": 0.1}])
async def test_a_body_without_an_end_is_refused_and_read_no_further_than_its_bound(bound):
    piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    async with limited(**bound) as (running, replica), connected(running) as (reader, writer):
        writer.write(HEAD.replace(b"/completions", b"/nowhere") + b"transfer-encoding: chunked\r\n\r\n" + piece)
        assert error_code(await asyncio.wait_for(read_answer(reader), 5)) == "route_not_found"
        num_sent = 0
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(10):
                while True:
                    writer.write(piece)
                    await writer.drain()
                    num_sent += len(piece)
                    await asyncio.sleep(0.01)
        if "max_discarded_bytes" in bound:
            assert num_sent < 16 << 20  # the bound, and what the system holds of it
        assert not replica.received


async def test_who_asks_before_sending_is_told_to_send_what_will_be_read():
    async with limited() as (running, replica), connected(running) as (reader, writer):
        body = b'{"model": "tiny"}'
        writer.write(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body))
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert b" 200 " in await reader.readline()
        assert len(replica.received) == 1


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /live HTTP/9.9\r\n\r\n",
        b"GET /live HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /live HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"GET /live HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"GET /nowhere HTTP/1.1\r\nhost: localhost\r\nexpect: miracles\r\n\r\n",
    ],
)
async def test_what_is_no_request_is_answered_in_our_shape(sent, caplog):
    async with limited() as (running, _), connected(running) as (reader, writer):
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), 5)
        head, _, _ = answer.lower().partition(b"\r\n\r\n")
        assert b" 400 " in head.splitlines()[0] and b"content-type: application/json" in head
        assert b"server:" not in head  # versions are nobody's business
        assert error_code(answer) == "invalid_request"
    assert not caplog.records


@pytest.mark.parametrize(("length", "code"), [(10_000, "body_too_large"), (10, "request_timeout")])
async def test_a_body_for_operators_is_read_within_the_same_limits(length, code):
    ring = KeyRing((ApiKey("boss", hashlib.sha256(b"boss").hexdigest(), KeyTerms(admin=True)),))
    limits = ConnectionLimits(body_seconds=0.1)
    async with running_gateway(ring=ring, limits=limits) as running, connected(running) as (reader, writer):
        writer.write(b"POST /admin/replicas HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer boss\r\n")
        writer.write(b"content-length: %d\r\n\r\n" % length)
        assert error_code(await asyncio.wait_for(read_answer(reader), 5)) == code


async def test_a_connection_that_says_nothing_is_closed():
    async with limited(idle_seconds=0.1) as (running, _), connected(running) as (reader, writer):
        writer.write(b"\r\n\r\n")  # begins no request
        assert await asyncio.wait_for(reader.read(), 5) == b""


async def test_another_version_of_http_is_refused_in_one_that_we_speak():
    async with limited() as (running, replica), connected(running) as (reader, writer):
        writer.write(HEAD.replace(b"HTTP/1.1", b"HTTP/2.0") + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
        answer = await asyncio.wait_for(reader.read(), 5)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert error_code(answer) == "invalid_request"
        assert not replica.received


async def send_large_lines(reader, writer):
    """Send header lines, each as large as a head may be, until the gateway cuts; it says nothing."""
    with contextlib.suppress(ConnectionError):
        for number in range(10):
            writer.write(b"x-%d: %b\r\n" % (number, b"y" * 60_000))
            await writer.drain()
            await asyncio.sleep(0.01)
        assert await asyncio.wait_for(reader.read(), 5) == b""


async def test_trailers_are_bounded_like_a_head():
    async with limited() as (running, replica), connected(running) as (reader, writer):
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(BODY), BODY))
        await send_large_lines(reader, writer)
        assert await cuts(running, "head")
        assert not replica.received


async def test_a_head_sent_ahead_is_bounded_like_any_other():
    async def wait(replica, request, body):
        await asyncio.Event().wait()

    async with limited(wait) as (running, replica), connected(running) as (reader, writer):
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
        await until(lambda: replica.received)
        writer.write(LIVE + LIVE[:-2])
        await send_large_lines(reader, writer)
        assert await cuts(running, "pipeline")


async def test_requests_one_after_the_other_each_have_their_time():
    async with limited(head_seconds=0.3) as (running, _), connected(running) as (reader, writer):
        for _ in range(3):
            writer.write(LIVE)
            assert b" 200 " in await read_answer(reader)
            await asyncio.sleep(0.2)


async def test_the_longest_idle_connection_makes_room_and_only_without_one_a_new_one_is_refused():
    release = asyncio.Event()

    async def wait(replica, request, body):
        await release.wait()
        return web.json_response({})

    async with limited(wait, max_connections=2) as (running, replica), contextlib.AsyncExitStack() as stack:
        pairs = []
        for _ in range(2):
            pairs.append(await stack.enter_async_context(connected(running)))
            pairs[-1][1].write(LIVE)
            await read_answer(pairs[-1][0])
        reader, writer = await stack.enter_async_context(connected(running))
        assert await asyncio.wait_for(pairs[0][0].read(), 5) == b""  # it made room
        for other in (writer, pairs[1][1]):
            other.write(HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
        await until(lambda: len(replica.received) == 2)
        refused, _ = await stack.enter_async_context(connected(running))
        answer = await asyncio.wait_for(refused.read(), 5)
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"retry-after: 1" in answer
        release.set()
        assert b" 200 " in await read_answer(reader)


async def test_a_reader_that_stops_holds_up_its_own_stream_only_and_is_cut_in_the_end():
    sent = 0

    async def pour(replica, request, body):
        nonlocal sent
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(4000):
            await response.write(b"data: " + b"x" * 16_000 + b"\n\n")
            sent += 16_000
        return response

    async with limited(pour, reader_seconds=3.0) as (running, replica), connected(running) as (_, writer):
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
        await until(lambda: replica.received)
        replica.answer = FakeReplica().answer
        assert (await running.ask()).status == 200
        in_flight = running.gateway.pool.find(replica.url)
        assert in_flight.num_in_flight == 1  # it may take its time
        await until(lambda: in_flight.num_in_flight == 0)
        assert 0 < sent < 4000 * 16_000
        assert await cuts(running, "reader")


@pytest.mark.parametrize("hosts", [b"", b"host: localhost\r\nhost: localhost\r\n"], ids=["none", "two"])
async def test_a_request_of_http_1_1_has_one_host(hosts):
    async with limited() as (running, _), connected(running) as (reader, writer):
        writer.write(b"GET /live HTTP/1.1\r\n" + hosts + b"\r\n")
        answer = await read_answer(reader)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert error_code(answer) == "invalid_request"


async def test_http_1_0_needs_no_host():
    async with limited() as (running, _), connected(running) as (reader, writer):
        writer.write(b"GET /live HTTP/1.0\r\n\r\n")
        assert (await read_answer(reader)).startswith(b"HTTP/1.0 200 ")


async def test_a_body_is_read_where_the_head_offers_another_protocol():
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
    async with limited() as (running, _), connected(running) as (reader, writer):
        writer.write(HEAD + offer + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
