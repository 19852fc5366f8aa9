"""A caller who goes away costs nothing more: every engine request of theirs is aborted at once."""

import asyncio
import json

import httpx
import pytest

from penstock.errors import EngineUnavailable
from tests.unit.server.conftest import MODEL, until
from tests.unit.server.sse import events_in

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def endless(service):
    """An engine that gives one token and then nothing."""
    service.engine.script = lambda request: [service.engine.event(request, [40]), asyncio.Event()]
    return service


@pytest.mark.parametrize("stream", [False, True])
async def test_a_closed_connection_aborts_every_choice(endless, address, stream):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
    body = json.dumps({**BODY, "stream": stream, "n": 3}).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    if stream:
        await reader.readuntil(b"data: ")
    else:
        await until(lambda: len(endless.engine.submitted) == 3)
    assert endless.engine.aborted == []
    writer.close()
    await writer.wait_closed()
    await until(lambda: len(endless.engine.aborted) == 3)
    assert sorted(endless.engine.aborted) == sorted(request.request_id for request in endless.engine.submitted)
    await until(lambda: len(endless.context.answers) == 0)


async def test_who_leaves_with_another_request_sent_ahead_is_answered_no_further(endless, address):
    _, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
    body = json.dumps({**BODY, "stream": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write((head + b"content-length: %d\r\n\r\n%b" % (len(body), body)) * 2)
    await until(lambda: len(endless.engine.submitted) == 1)
    writer.close()
    await writer.wait_closed()
    await until(lambda: len(endless.engine.aborted) == len(endless.engine.submitted))
    await until(lambda: len(endless.context.answers) == 0)


async def test_a_half_sent_body_is_no_failure_of_ours(service, address, caplog):
    _, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
    writer.write(
        b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
    )
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    await writer.wait_closed()
    async with httpx.AsyncClient(base_url=address) as client:
        assert (await client.get("/live")).status_code == 200
        await until(lambda: 'penstock_http_requests_total{route="/tokenize",status="499"} 1.0' in metrics(service))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def metrics(service) -> str:
    return service.context.metrics.exposition("")[0].decode()


async def test_a_finished_answer_aborts_nothing(service):
    await service.chat()
    await service.chat(stream=True)
    assert service.engine.aborted == []


async def test_a_disconnect_is_counted_and_logged_as_an_abort(endless, address, caplog):
    caplog.set_level("INFO", "penstock.access")
    async with httpx.AsyncClient(base_url=address) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/chat/completions", json=BODY, timeout=httpx.Timeout(30, read=0.2))
    await until(lambda: "penstock_http_client_disconnects_total 1.0" in metrics(endless))
    (line,) = [record.penstock_fields for record in caplog.records if record.name == "penstock.access"]
    assert (line["finish"], line["status"]) == ("abort", 499)


async def test_a_drain_that_runs_out_ends_streams_with_an_error_event(endless, address):
    async with (
        httpx.AsyncClient(base_url=address) as client,
        client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as response,
    ):
        pieces = response.aiter_raw()
        begun = await anext(pieces)
        endless.context.answers.end_all(EngineUnavailable("the server is shutting down"))
        content = begun + b"".join([piece async for piece in pieces])
    assert events_in(content)[-1]["error"]["code"] == "engine_unavailable"
    assert endless.engine.aborted == [endless.engine.submitted[0].request_id]


async def test_a_slow_reader_gets_everything(service, address):
    text = "0123456789" * 40
    service.engine.script = lambda request: service.engine.say(request, text)
    pieces = []
    async with (
        httpx.AsyncClient(base_url=address) as client,
        client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as response,
    ):
        async for chunk in response.aiter_raw(4096):
            pieces.append(chunk)
            await asyncio.sleep(0.001)
    events = events_in(b"".join(pieces))
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1]) == text
