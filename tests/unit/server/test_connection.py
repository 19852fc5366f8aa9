"""Clients that are slow, silent or greedy: each is bounded, then cut, and the others are served."""

import asyncio
import contextlib
import json
import resource
import socket

import httpx
import pytest

from penstock import connection_limits
from penstock.connection_limits import ConnectionLimits, raise_file_limit
from penstock.server import connection
from penstock.tenants import ApiKey
from tests.unit.server.conftest import MODEL, listening, running_service, until

HEAD = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
LIVE = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"


@contextlib.asynccontextmanager
async def connected(url):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def send_for_ever(writer):
    while True:
        writer.write(b"x" * 65536)
        await writer.drain()


def cuts(service, why):
    text = service.context.metrics.exposition("")[0].decode()
    return f'penstock_http_connections_cut_total{{why="{why}"}} 1.0' in text


def error_code(answer):
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]


async def test_a_head_that_does_not_come_is_answered_408_and_closed(service):
    async with (
        listening(service.context, ConnectionLimits(head_seconds=0.1)) as url,
        connected(url) as (reader, writer),
    ):
        writer.write(HEAD)
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert error_code(answer) == "request_timeout"
    assert cuts(service, "head")


async def test_a_head_that_drips_is_not_given_more_time_for_it(service):
    async with (
        listening(service.context, ConnectionLimits(head_seconds=0.3)) as url,
        connected(url) as (reader, writer),
    ):
        writer.write(HEAD)
        # Not to the connection's end, which what is sent to who has closed makes a reset.
        answer = asyncio.create_task(reader.readline())
        while not answer.done():
            writer.write(b"x: y\r\n")
            await asyncio.sleep(0.12)
        assert (await answer).startswith(b"HTTP/1.1 408 ")


async def test_a_head_without_end_is_answered_431(service):
    async with (
        listening(service.context, ConnectionLimits(max_head_bytes=1000)) as url,
        connected(url) as (reader, writer),
    ):
        writer.write(HEAD + b"x: " + b"y" * 2000)
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert error_code(answer) == "head_too_large"


@pytest.mark.parametrize("lines", [b"x: " + b"y" * 2000, b"x: y\r\n" * 500 + b"x: y"], ids=["one", "many"])
async def test_a_head_that_is_whole_and_too_large_is_answered_431(service, lines):
    async with (
        listening(service.context, ConnectionLimits(max_head_bytes=1000)) as url,
        connected(url) as (reader, writer),
    ):
        writer.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\n" + lines + b"\r\n\r\n")
        answer = await reader.read()
    assert error_code(answer) == "head_too_large"


@pytest.mark.parametrize("trailer", [b"x: " + b"y" * 5000, b"x: y\r\n" * 500], ids=["one", "many"])
async def test_trailers_have_the_limits_of_a_head(service, trailer):
    async with (
        listening(service.context, ConnectionLimits(max_head_bytes=1000)) as url,
        connected(url) as (reader, writer),
    ):
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n")
        await writer.drain()
        writer.write(b"0\r\n")
        for start in range(0, len(trailer), 500):
            writer.write(trailer[start : start + 500])
            await asyncio.sleep(0.01)
        answer = await reader.read()
    assert error_code(answer) == "head_too_large"


async def test_a_body_of_small_pieces_is_no_head(service):
    body = json.dumps({"prompt": "x" * 300}).encode()
    async with (
        listening(service.context, ConnectionLimits(max_head_bytes=1000)) as url,
        connected(url) as (reader, writer),
    ):
        writer.write(HEAD + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n")
        writer.write(b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200 ")


async def test_who_is_refused_and_still_sends_hears_why(service):
    async with (
        listening(service.context, ConnectionLimits(max_head_bytes=1000)) as url,
        connected(url) as (reader, writer),
    ):
        for _ in range(64):
            writer.write(b"x" * 65536)
        await writer.drain()
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 4")


async def test_who_is_refused_and_sends_for_ever_is_left(service, monkeypatch):
    monkeypatch.setattr(connection, "_FAREWELL_BYTES", 100_000)
    async with (
        listening(service.context, ConnectionLimits(max_head_bytes=1000)) as url,
        connected(url) as (_, writer),
    ):
        with pytest.raises(ConnectionError):
            await send_for_ever(writer)


async def test_a_body_that_does_not_come_is_answered_408(service):
    limits = ConnectionLimits(body_seconds=0.1, body_bytes_per_second=10**6)
    async with listening(service.context, limits) as url, connected(url) as (reader, writer):
        writer.write(HEAD + b"content-length: 100\r\n\r\n{")
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert cuts(service, "body")


async def test_a_body_that_keeps_its_rate_may_take_longer(service):
    limits = ConnectionLimits(body_seconds=0.1, body_bytes_per_second=10)
    body = json.dumps({"prompt": "x" * 50}).encode()
    async with listening(service.context, limits) as url, connected(url) as (reader, writer):
        writer.write(HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body))
        for start in range(0, len(body), 10):
            writer.write(body[start : start + 10])
            await asyncio.sleep(0.05)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")


async def test_a_connection_that_says_nothing_is_closed(service):
    limits = ConnectionLimits(idle_seconds=0.1)
    async with listening(service.context, limits) as url, connected(url) as (reader, writer):
        writer.write(b"\r\n")  # begins no request
        assert await reader.read() == b""


async def test_what_is_no_http_is_answered_in_our_shape(service, address):
    async with connected(address) as (reader, writer):
        writer.write(b"nonsense\r\n\r\n")
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert error_code(answer) == "invalid_request"


async def test_a_reader_that_stops_is_cut_and_its_request_aborted(service):
    service.engine.script = lambda request: [service.engine.event(request, [40] * 64) for _ in range(20_000)]
    limits = ConnectionLimits(reader_seconds=0.2, socket_bytes=4096, unread_bytes=4096)
    body = json.dumps({"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 400}).encode()
    async with listening(service.context, limits) as url:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
            head = HEAD.replace(b"/tokenize", b"/v1/completions")
            client.sendall(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
            await until(lambda: service.engine.aborted)
            await until(lambda: len(service.context.answers) == 0)
        assert cuts(service, "reader")
        async with httpx.AsyncClient(base_url=url) as other:
            assert (await other.get("/live")).status_code == 200


async def test_the_longest_idle_connection_makes_room_for_a_new_one(service):
    async with (
        listening(service.context, ConnectionLimits(max_connections=2)) as url,
        connected(url) as first,
        connected(url) as second,
    ):
        for reader, writer in (second, first):  # first is now idle for the shorter time
            writer.write(LIVE)
            await reader.readuntil(b'{"status":"live"}')
        async with connected(url) as (reader, writer):
            writer.write(LIVE)
            await reader.readuntil(b'{"status":"live"}')
        assert await second[0].read() == b""
        first[1].write(LIVE)
        await first[0].readuntil(b'{"status":"live"}')
    assert cuts(service, "crowd")


async def test_a_new_connection_is_refused_when_all_others_are_busy(service):
    service.engine.script = lambda request: [asyncio.Event()]
    body = json.dumps({"model": MODEL, "prompt": "x"}).encode()
    async with listening(service.context, ConnectionLimits(max_connections=1)) as url, connected(url) as (_, writer):
        writer.write(
            HEAD.replace(b"/tokenize", b"/v1/completions") + b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        await until(lambda: service.engine.submitted)
        async with connected(url) as (reader, _):
            answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 429 ")
    assert error_code(answer) == "overloaded"


async def test_requests_sent_ahead_without_end_are_cut(service):
    service.engine.script = lambda request: [asyncio.Event()]
    body = json.dumps({"model": MODEL, "prompt": "x"}).encode()
    async with listening(service.context, ConnectionLimits(max_pipelined=4)) as url, connected(url) as (reader, writer):
        writer.write(
            HEAD.replace(b"/tokenize", b"/v1/completions") + b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        await until(lambda: service.engine.submitted)
        writer.write(LIVE * 1000)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        await until(lambda: service.engine.aborted)
    assert cuts(service, "pipeline")


async def test_requests_sent_ahead_are_answered_in_order(service, address):
    async with connected(address) as (reader, writer):
        writer.write(LIVE * 10)
        for _ in range(10):
            await reader.readuntil(b'{"status":"live"}')


@pytest.mark.parametrize(
    ("soft", "hard", "raised_to", "room"),
    [
        (1024, 100_000, 16_640, 16_384),
        (1024, 4096, 4096, 3840),
        (50_000, 100_000, None, 16_384),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, 16_384),
        (1024, resource.RLIM_INFINITY, 16_640, 16_384),
    ],
)
def test_the_file_limit_is_raised_as_far_as_connections_need(monkeypatch, soft, hard, raised_to, room):
    changes = []
    monkeypatch.setattr(connection_limits.resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(connection_limits.resource, "setrlimit", lambda kind, pair: changes.append(pair[0]))
    assert raise_file_limit(ConnectionLimits()) == room
    assert changes == ([] if raised_to is None else [raised_to])


def send_all_then_read(url, head, body):
    """Send everything before reading anything, as many clients do; return the answer."""
    length = b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
        client.sendall(head + length + body)
        answer = b""
        while piece := client.recv(65536):
            answer += piece
        return answer


@pytest.mark.parametrize(("path", "code"), [(b"/tokenize", "body_too_large"), (b"/nowhere", "route_not_found")])
async def test_who_sends_more_than_is_taken_still_reads_the_refusal(service, path, code):
    body = b"x" * (8 * 1024 * 1024)
    async with listening(service.context) as url:
        answer = await asyncio.to_thread(send_all_then_read, url, HEAD.replace(b"/tokenize", path), body)
    assert error_code(answer) == code


async def test_who_sends_much_without_a_key_still_reads_the_refusal():
    keys = (ApiKey("alice", "0" * 64),)
    async with running_service(keys=keys) as service, listening(service.context) as url:
        answer = await asyncio.to_thread(send_all_then_read, url, HEAD, b"x" * (8 * 1024 * 1024))
    assert error_code(answer) == "invalid_api_key"


async def test_a_refusal_waits_only_so_long_for_a_body_that_does_not_come(service, monkeypatch):
    monkeypatch.setattr("penstock.server.body._DISCARD_SECONDS", 0.05)
    async with listening(service.context) as url, connected(url) as (reader, writer):
        writer.write(HEAD + b"connection: close\r\ncontent-length: 99999999\r\n\r\nx")
        assert error_code(await reader.read()) == "body_too_large"


async def test_who_asks_before_sending_is_refused_without_being_asked_to_send(service, address):
    async with connected(address) as (reader, writer):
        writer.write(HEAD + b"expect: 100-continue\r\nconnection: close\r\ncontent-length: 99999999\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 413 ")


async def test_an_http_1_0_client_reads_a_stream_to_the_connections_end(service):
    body = json.dumps({"model": MODEL, "prompt": "Hi", "stream": True}).encode()
    head = HEAD.replace(b"/tokenize HTTP/1.1", b"/v1/completions HTTP/1.0") + b"expect: 100-continue\r\n"
    async with listening(service.context) as url, connected(url) as (reader, writer):
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        answer = await reader.read()
    head, _, events = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")  # at once: such clients do not know 100 Continue
    assert b"transfer-encoding" not in head
    assert events.startswith(b"data: {")
    assert events.endswith(b"\n\ndata: [DONE]\n\n")


@pytest.mark.parametrize("hosts", [b"", b"host: localhost\r\nhost: localhost\r\n"], ids=["none", "two"])
async def test_a_request_of_http_1_1_has_one_host(service, hosts):
    body = b"content-length: 2\r\ncontent-type: application/json\r\n\r\n{}"
    last = LIVE.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    async with listening(service.context) as url, connected(url) as (reader, writer):
        writer.write(b"POST /tokenize HTTP/1.1\r\n" + hosts + body + last)
        refusal, _, answer = (await reader.read()).partition(b"HTTP/1.1 200 ")
    assert refusal.startswith(b"HTTP/1.1 400 ")
    assert error_code(refusal) == "invalid_request"
    assert answer, "what came behind it is answered"


@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunks"])
@pytest.mark.parametrize("piece_bytes", [7, 10_000])
async def test_a_body_is_read_where_the_head_offers_another_protocol(service, is_chunked, piece_bytes):
    body = b'{"prompt": "hi"}'
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
    sized = b"content-length: %d\r\n\r\n%s" % (len(body), body)
    chunked = b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    last = LIVE.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    sent = (HEAD + offer + (chunked if is_chunked else sized)) * 2 + last
    async with listening(service.context) as url, connected(url) as (reader, writer):
        for start in range(0, len(sent), piece_bytes):
            writer.write(sent[start : start + piece_bytes])
            await asyncio.sleep(0)
        answers = (await reader.read()).split(b"HTTP/1.1 ")
    assert [answer[:3] for answer in answers] == [b"", b"200", b"200", b"200"]
    assert b'"tokens"' in answers[1]
    assert b'"tokens"' in answers[2]


async def test_an_offer_of_another_protocol_may_come_with_the_last_request(service):
    async with listening(service.context) as url, connected(url) as (reader, writer):
        writer.write(LIVE.replace(b"\r\n\r\n", b"\r\nconnection: Upgrade, close\r\nupgrade: h2c\r\n\r\n"))
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")


async def test_http_1_0_needs_no_host(service):
    async with listening(service.context) as url, connected(url) as (reader, writer):
        writer.write(b"GET /live HTTP/1.0\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
