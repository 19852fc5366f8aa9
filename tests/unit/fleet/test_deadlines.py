"""Deadlines through a gateway: the request's own end, which no replica is blamed for and none need try again."""

import asyncio
import json
import time

import pytest
from aiohttp import web

from penstock.protocol.frames import FRAMES_HEADER, ChoiceTokens, failure_frame, frame
from tests.fakes.fake_replica import FakeReplica
from tests.unit.fleet.conftest import running_gateway
from tests.unit.fleet.test_gateway import chunk

LATE = {"error": {"code": "deadline_exceeded", "message": "the replica's own word"}}
LATE_EVENT = b"data: %b\n\n" % json.dumps(LATE).encode()


async def end_late(replica, request, body):
    """Answer as a server of ours does when a deadline passes behind a first token."""
    if not body.get("stream"):
        return web.json_response(LATE, status=504)
    response = web.StreamResponse(headers={"content-type": "text/event-stream", FRAMES_HEADER: "lease-1"})
    await response.prepare(request)
    await response.write(frame(chunk("one "), ChoiceTokens(0, [1])))
    await response.write(failure_frame(LATE_EVENT, "deadline_exceeded"))
    return response


def slow(*, streams, head_seconds=0.0):
    """Answer as a server that knows of no deadline: an event each 50 ms, or nothing."""

    async def answer(replica, request, body):
        await asyncio.sleep(head_seconds)
        if not streams:
            return web.json_response({"choices": [{"text": "late"}]})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(100):
            await response.write(chunk("x"))
            await asyncio.sleep(0.05)
        return response

    return answer


@pytest.mark.parametrize("streams", [True, False])
async def test_whom_its_deadline_ended_is_tried_nowhere_else_and_nobody_is_blamed(streams):
    async with (
        FakeReplica(answer=end_late).running() as one,
        FakeReplica(answer=end_late).running() as two,
        running_gateway(one, two) as running,
    ):
        for number in range(1, 13):
            response = await running.ask(stream=streams)
            assert len(one.received) + len(two.received) == number
        told = await response.read()
        assert b"the replica's own word" in told
        assert (response.status, b"one " in told) == ((200, True) if streams else (504, False))
        assert [replica.breaker.num_ejections for replica in running.gateway.pool] == [0, 0]
        metrics = running.gateway.context.metrics.exposition("")[0].decode()
        assert 'outcome="lost"' not in metrics
        (last,) = running.gateway.context.decisions.newest(1)
        assert last.error_code == "deadline_exceeded"


@pytest.mark.parametrize("streams", [True, False])
async def test_a_server_that_knows_of_no_deadline_is_left_when_it_passes(streams):
    answer = slow(streams=streams, head_seconds=0.0 if streams else 5.0)
    async with FakeReplica(answer=answer).running() as one, running_gateway(one, kind="vllm") as running:
        began = time.monotonic()
        response = await running.ask(stream=streams, deadline_ms=1000)
        told = await response.read()
        assert time.monotonic() - began < 4.5
        assert response.status == (200 if streams else 504)
        last = told.strip().split(b"\n\n")[-1].removeprefix(b"data: ")
        assert json.loads(last)["error"]["code"] == "deadline_exceeded"
        assert len(one.received) == 1
        assert [replica.breaker.num_ejections for replica in running.gateway.pool] == [0]


async def test_a_deadline_that_passes_while_replicas_fail_is_504():
    async def fail_slowly(replica, request, body):
        await asyncio.sleep(0.75)
        return web.json_response({"error": {"code": "engine_failed"}}, status=500)

    async with (
        FakeReplica(answer=fail_slowly).running() as one,
        FakeReplica(answer=fail_slowly).running() as two,
        running_gateway(one, two) as running,
    ):
        response = await running.ask(deadline_ms=500)
        assert (response.status, (await response.json())["error"]["code"]) == (504, "deadline_exceeded")
        assert len(one.received) + len(two.received) == 1


@pytest.mark.parametrize("begins", [b"", b": ping\n\n"])
async def test_a_foreign_stream_that_breaks_off_before_its_first_event_is_another_replicas(begins):
    async def die(replica, request, body):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(begins)
        await asyncio.sleep(0.02)
        request.transport.close()
        return response

    async def speak(replica, request, body):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.sleep(0.3)
        await response.write(chunk("hello") + b"data: [DONE]\n\n")
        return response

    async with (
        FakeReplica(answer=die).running() as bad,
        FakeReplica(answer=speak).running() as good,
        running_gateway(bad, good, kind="vllm") as running,
    ):
        while not bad.received:
            response = await running.ask(stream=True)
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        route = response.headers["x-penstock-route"]
        assert "attempts=2" in route and good.name in route
        assert float(route.partition("ttft_ms=")[2].partition(";")[0]) >= 300  # behind the first event, not the head
