"""What callers and operators are told of requests that the gateway refused, lost or moved."""

import asyncio
import logging

import msgspec
import pytest
from aiohttp import web

from penstock.fleet.config import ReplicaEntry
from penstock.fleet.router.decisions import Decision
from penstock.protocol.frames import FRAMES_HEADER, ChoiceTokens, frame
from tests.fakes.fake_replica import FakeReplica
from tests.unit.fleet.conftest import QUICK, running_gateway, until
from tests.unit.fleet.test_gateway import chunk, framed, refuse
from tests.unit.fleet.test_replica_events import lines
from tests.unit.server.sse import events_in


def newest(running):
    (decision,) = running.gateway.context.decisions.newest(1)
    return decision


def counted(running):
    """Return what `penstock_gateway_requests_total` has, by model and status."""
    return {
        (sample.labels["model"], sample.labels["status"]): sample.value
        for family in running.gateway.context.metrics.requests.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }


async def never(replica, request, body):
    await asyncio.Event().wait()


async def test_a_refusal_for_want_of_a_place_says_why_and_how_long_it_waited():
    async with FakeReplica(answer=never).running() as full, running_gateway(full, max_in_flight=1) as running:
        first = asyncio.create_task(running.ask())
        await until(lambda: full.received)
        answer = await running.ask()
        decision = newest(running)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    reason = "every replica of the model stayed full for 0.2 s"
    assert answer.headers["x-penstock-route"].startswith(f'replica=none; policy=least-loaded; reason="{reason}"')
    assert (decision.status, decision.error_code, decision.reason) == (429, "overloaded", reason)
    assert (decision.policy, decision.replica, decision.attempts) == ("least-loaded", "", 0)
    assert decision.waited_seconds >= 0.2


async def test_a_refusal_for_want_of_a_replica_says_so():
    async with FakeReplica(ready=503).running() as down, running_gateway(down) as running:
        answer = await running.ask()
        decision = newest(running)
    assert "replica=none" in answer.headers["x-penstock-route"]
    assert "no replica of this model is ready" in answer.headers["x-penstock-route"]
    assert (decision.status, decision.error_code) == (503, "engine_unavailable")
    assert decision.waited_seconds >= 0.2


async def test_a_refusal_behind_a_replicas_own_names_that_replica_and_the_wait():
    async with (
        FakeReplica(answer=refuse(429, "overloaded", retry_after="30")).running() as full,
        running_gateway(full) as running,
    ):
        answer = await running.ask()
        decision = newest(running)
    assert f"replica={full.name}" in answer.headers["x-penstock-route"]
    assert "stayed full" in answer.headers["x-penstock-route"]
    assert (decision.status, decision.attempts, decision.error_code) == (429, 1, "overloaded")
    assert decision.waited_seconds >= 0.2


async def test_a_decision_on_a_request_whose_caller_left_has_the_status_of_that():
    async with FakeReplica(answer=never).running() as one, running_gateway(one) as running:
        asked = asyncio.create_task(running.ask())
        await until(lambda: one.received)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: running.gateway.context.decisions.newest(1))
        assert newest(running).status == 499


@pytest.mark.parametrize("name", ['a"; replica=x', "line\r\nbreak", "größer", "x" * 2000])
async def test_what_a_caller_sent_cannot_break_out_of_a_refusals_header(name):
    async with FakeReplica().running() as one, running_gateway(one) as running:
        answer = await running.ask(model=name)
    assert answer.status == 404
    route = answer.headers["x-penstock-route"]
    assert route.count('"') == 2 and route.count(";") == 4
    assert len(route) < 500


def test_a_reason_without_anything_odd_stands_in_the_header_as_it_is():
    decision = Decision(
        request_id="1", time=0.0, tenant="a", model="tiny", policy="round-robin", replica="one:80",
        reason="192 of 200 tokens cached, 0 prompts before it", attempts=1, waited_seconds=0.001,
    )  # fmt: skip
    assert decision.header() == (
        'replica=one:80; policy=round-robin; reason="192 of 200 tokens cached, 0 prompts before it"; attempts=1; '
        "waited_ms=1.0"
    )


async def say_a_word_and_die(replica, request, body):
    response = web.StreamResponse(headers={"content-type": "text/event-stream", FRAMES_HEADER: "lease-1"})
    await response.prepare(request)
    await response.write(frame(chunk("one "), ChoiceTokens(0, [0])))
    await asyncio.sleep(0.02)
    await replica.die()
    return response


@pytest.fixture
async def mixed():
    """A Penstock replica that dies of its first request, beside a foreign one of the same model that is busier."""
    # For a place a test that waited would not end; for the replica that died streams are held, and it never comes back.
    queue = msgspec.structs.replace(QUICK.queue, max_wait_seconds=60.0, hold_seconds=0.2)
    async with (
        FakeReplica(answer=say_a_word_and_die).running() as dying,
        FakeReplica(metrics="vllm:num_requests_running 5\n").running() as foreign,
    ):
        entries = (ReplicaEntry(url=dying.url), ReplicaEntry(url=foreign.url, kind="vllm"))
        config = msgspec.structs.replace(QUICK, queue=queue, replicas=entries)
        async with running_gateway(config=config) as running:
            yield running, dying, foreign


async def test_a_stream_that_dies_with_its_replica_is_recorded_as_lost_and_others_are_served(mixed, caplog):
    caplog.set_level(logging.INFO)
    running, dying, foreign = mixed
    answer = await running.ask(stream=True)
    assert events_in(await answer.read())[-1]["error"]["code"] == "engine_failed"
    decision = newest(running)
    assert (decision.status, decision.error_code) == (200, "engine_failed")
    assert (decision.replica, decision.resumptions) == (dying.name, 0)
    assert not lines(caplog, "a stream goes on")
    assert [line["failed"] for line in lines(caplog, "a stream is lost")] == [dying.name]
    assert f"replica={foreign.name}" in (await running.ask()).headers["x-penstock-route"]


async def test_a_stream_that_goes_on_where_it_broke_off_is_not_said_to_have_moved(caplog):
    answers = [framed("a", "b", fails_after=1), framed("a", "b")]

    async def answer_in_turn(replica, request, body):
        return await answers.pop(0)(replica, request, body)

    async with FakeReplica(answer=answer_in_turn).running() as one, running_gateway(one) as running:
        events = events_in(await (await running.ask(stream=True)).read())
        assert events[-1] == "[DONE]"
        assert (newest(running).resumptions, newest(running).error_code) == (1, "")
    (line,) = lines(caplog, "a stream goes on")
    assert line["replica"] == line["failed"] == one.name
    assert not lines(caplog, "a stream goes on with another replica")


async def test_a_stream_that_a_second_replica_refused_moved_from_the_first_to_the_third(caplog):
    async with (
        FakeReplica(answer=framed("a", "b", fails_after=1)).running() as first,
        FakeReplica(answer=refuse(503, "engine_unavailable")).running() as second,
        FakeReplica(answer=framed("a", "b"), metrics="penstock_total_running_requests 9\n").running() as third,
        running_gateway(first, second, third) as running,
    ):
        while not (first.received and second.received):
            await running.ask(stream=True)
    (line,) = lines(caplog, "a stream goes on")
    assert (line["failed"], line["replica"]) == (first.name, third.name)


async def test_only_callers_requests_are_counted_as_such():
    async with FakeReplica(ready=503).running() as down, running_gateway(down) as running:
        for path in ("/live", "/ready", "/metrics", "/admin/replicas"):
            await running.client.get(running.url + path)
        assert counted(running) == {}
        await running.client.get(f"{running.url}/v1/models")
        await running.client.get(f"{running.url}/nowhere")
        await running.ask()
        assert counted(running) == {("", "200"): 1, ("", "404"): 1, ("", "503"): 1}
