"""The gateway before scripted servers: where requests go, what is tried again, what callers see."""

import asyncio
import contextlib
import gzip
import hashlib
import json
import re
import socket
import time
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from penstock.errors import Overloaded
from penstock.fleet.adapters.interface import ServedModel
from penstock.fleet.config import FleetConfig, ModelSection, ReplicaEntry
from penstock.fleet.gateway import Gateway
from penstock.fleet.replica import ReplicaPool
from penstock.fleet.router import proxy
from penstock.fleet.router.dispatch import Dispatcher, Wish
from penstock.fleet.router.urgency import Urgency
from penstock.protocol.frames import FRAMES_HEADER, ChoiceTokens, failure_frame, frame, last_frame
from penstock.protocol.prompt_note import PROMPT_HEADER
from penstock.store.key_ring import KeyRing
from penstock.tenants import ApiKey, KeyTerms
from tests.fakes.fake_replica import FakeReplica, say_hello
from tests.unit.fleet.conftest import QUICK, FakeClock, make_query, running_gateway, until
from tests.unit.server.sse import events_in, text_of

UNREADABLE = "a replica does not tell this gateway what it asks: /metrics gives no load that can be read"
DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


def refuse(status, code="", **headers):
    async def answer(replica, request, body):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.json_response({"error": {"message": "no", "code": code}}, status=status, headers=named)

    return answer


async def fail_deeply(replica, request, body):
    return web.Response(status=500, body=b'{"x":' + b"[" * 20000 + b"]" * 20000 + b"}")


async def hang_up(replica, request, body):
    request.transport.close()
    return web.Response()


def chunk(text, number=0):
    document = {"id": "cmpl-1", "created": 5, "choices": [{"index": 0, "text": text, "finish_reason": None}]}
    return b"data: %b\n\n" % json.dumps(document).encode()


def framed(*words, fails_after=None, with_error=False, note=""):
    """Answer with a framed stream, a word a token numbered by its place; go on where another stopped."""

    async def answer(replica, request, body):
        headers = {"content-type": "text/event-stream", FRAMES_HEADER: "lease-1", PROMPT_HEADER: note}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        begun = len(body.get("continue_from", {}).get("token_ids", [[]])[0])
        for place, word in list(enumerate(words))[begun:]:
            if place == fails_after and with_error:
                await response.write(failure_frame(b'data: {"error": {}}\n\n', "engine_failed"))
                return response
            if place == fails_after:
                await response.write(frame(chunk(word), ChoiceTokens(0, [place]))[:-3])  # cut in the middle of a frame
                request.transport.close()
                return response
            await response.write(frame(chunk(word), ChoiceTokens(0, [place])))
        await response.write(last_frame(b"data: [DONE]\n\n"))
        return response

    return answer


async def test_requests_are_spread_and_say_where_they_went():
    async with FakeReplica().running() as one, FakeReplica().running() as two, running_gateway(one, two) as running:
        routes = [(await running.ask()).headers["x-penstock-route"] for _ in range(2)]
        assert {re.search(r"replica=([^;]+)", route)[1] for route in routes} == {one.name, two.name}
        assert all("policy=least-loaded" in route and "attempts=1" in route for route in routes)


async def test_without_keys_a_gateway_answers_no_page_whose_name_points_at_it():
    async with FakeReplica().running() as replica, running_gateway(replica) as running:
        for headers in ({"host": "evil.example:18200"}, {"sec-fetch-site": "cross-site"}):
            response = await running.ask(headers)
            assert (response.status, (await response.json())["error"]["code"]) == (403, "permission_denied")
        assert (await running.ask({"host": "localhost"})).status == 200
        assert len(replica.received) == 1


async def test_with_keys_a_gateway_serves_pages_of_other_sites_also_from_an_open_replica():
    ring = KeyRing((ApiKey("alice", hashlib.sha256(b"a").hexdigest()),))
    async with FakeReplica().running() as replica, running_gateway(replica, ring=ring) as running:
        page = {"authorization": "Bearer a", "host": "models.example", "sec-fetch-site": "cross-site"}
        assert (await running.ask(page)).status == 200
        assert "sec-fetch-site" not in replica.headers[-1]


async def test_while_no_replica_is_there_what_is_declared_is_listed_for_who_may_use_it():
    keys = [("all", None), ("one", ("scaled",))]
    ring = KeyRing(
        [ApiKey(name, hashlib.sha256(name.encode()).hexdigest(), KeyTerms(models=models)) for name, models in keys]
    )
    models = {name: ModelSection(policy="round-robin") for name in ("scaled", "other")}
    queue = msgspec.structs.replace(QUICK.queue, hold_unknown=False)
    config = msgspec.structs.replace(QUICK, models=models, aliases={"nick": "scaled"}, queue=queue)
    async with running_gateway(config=config, ring=ring) as running:
        for key, names in (("all", ["nick", "other", "scaled"]), ("one", ["nick", "scaled"])):
            headers = {"authorization": f"Bearer {key}"}
            listed = await (await running.client.get(f"{running.url}/v1/models", headers=headers)).json()
            assert [item["id"] for item in listed["data"]] == names
            refused = await running.ask(headers, model="nope")
            assert refused.status == 404
            assert f"served: {', '.join(names)}" in (await refused.json())["error"]["message"]


async def test_a_refusal_names_no_model_that_the_key_may_not_use():
    ring = KeyRing((ApiKey("alice", hashlib.sha256(b"a").hexdigest(), KeyTerms(models=("other",))),))
    async with FakeReplica(models=("hidden",)).running() as replica, running_gateway(replica, ring=ring) as running:
        refused = await running.ask({"authorization": "Bearer a"}, model="other")
        assert refused.status == 404
        assert "hidden" not in await refused.text() + str(refused.headers)


async def test_models_are_merged_and_aliases_reach_their_model():
    config = msgspec.structs.replace(QUICK, aliases={"gpt": "big"})
    async with (
        FakeReplica(models=("tiny",)).running() as one,
        FakeReplica(models=("big",)).running() as two,
        running_gateway(one, two, config=config) as running,
    ):
        listed = await (await running.client.get(f"{running.url}/v1/models")).json()
        assert [item["id"] for item in listed["data"]] == ["big", "gpt", "tiny"]
        assert (await running.ask(model="gpt")).status == 200
        assert [body["model"] for body in two.received] == ["big"]
        missing = await running.ask(model="other")
        assert missing.status == 404
        assert (await missing.json())["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    "failure", [hang_up, fail_deeply, refuse(503, "engine_unavailable"), refuse(500, "engine_failed")]
)
async def test_what_fails_before_its_first_byte_is_tried_elsewhere(failure):
    async with (
        FakeReplica(answer=failure).running() as bad,
        FakeReplica().running() as good,
        running_gateway(bad, good) as running,
    ):
        answers = [await running.ask() for _ in range(2)]
        assert [answer.status for answer in answers] == [200, 200]
        assert any("attempts=2" in answer.headers["x-penstock-route"] for answer in answers)


async def test_connections_that_a_replica_gave_up_cost_a_request_no_attempt():
    used = set()

    async def once_a_connection(replica, request, body):
        if request.transport in used:
            return await hang_up(replica, request, body)
        used.add(request.transport)
        await until(lambda: len(used) >= 3)
        return web.json_response({"choices": []})

    async with FakeReplica(answer=once_a_connection).running() as one, running_gateway(one) as running:
        assert [item.status for item in await asyncio.gather(*[running.ask() for _ in range(3)])] == [200] * 3
        answer = await running.ask()
        assert answer.status == 200 and "attempts=1;" in answer.headers["x-penstock-route"]
        assert len(one.received) == 5


async def test_a_request_that_fails_everywhere_is_given_up_after_three():
    replicas = [FakeReplica(answer=refuse(500, "engine_failed")) for _ in range(5)]
    async with all_running(replicas), running_gateway(*replicas) as running:
        assert (await running.ask()).status == 500
        assert sum(len(replica.received) for replica in replicas) == 3


async def test_a_request_that_its_only_replica_cannot_digest_does_not_have_it_ejected():
    async with FakeReplica(answer=refuse(500)).running() as one, running_gateway(one) as running:
        assert (await running.ask()).status == 500
        assert running.gateway.pool.find(one.url).is_usable


async def test_the_callers_own_mistakes_pass_through_once():
    async with FakeReplica(answer=refuse(400, "invalid_parameter")).running() as one, FakeReplica().running() as two:
        two.answer = one.answer
        async with running_gateway(one, two) as running:
            assert (await running.ask()).status == 400
            assert len(one.received) + len(two.received) == 1


async def test_an_answer_that_is_compressed_says_so():
    async def answer(replica, request, body):
        packed = gzip.compress(b'{"choices": []}')
        return web.Response(body=packed, headers={"content-encoding": "gzip"}, content_type="application/json")

    async with FakeReplica(answer=answer).running() as one, running_gateway(one, kind="vllm") as running:
        response = await running.ask()
        assert response.headers["content-encoding"] == "gzip"
        assert await response.json() == {"choices": []}


async def test_a_tenants_limit_is_not_tried_elsewhere():
    limit = refuse(429, "rate_limit_exceeded", retry_after="7")
    async with (
        FakeReplica(answer=limit).running() as one,
        FakeReplica(answer=limit).running() as two,
        running_gateway(one, two) as running,
    ):
        answer = await running.ask()
        assert (answer.status, answer.headers["retry-after"]) == (429, "7")
        assert len(one.received) + len(two.received) == 1


async def test_a_full_replica_is_left_alone_while_another_has_room():
    async with (
        FakeReplica(answer=refuse(429, "overloaded", retry_after="30")).running() as full,
        FakeReplica().running() as free,
        running_gateway(full, free) as running,
    ):
        assert [(await running.ask()).status for _ in range(6)] == [200] * 6
        assert len(full.received) <= 1


async def test_a_full_fleet_is_429_with_the_replicas_own_wait_and_none_at_all_is_503():
    async with (
        FakeReplica(answer=refuse(429, "overloaded", retry_after="30")).running() as full,
        running_gateway(full) as running,
    ):
        answer = await running.ask()
        assert (answer.status, answer.headers["retry-after"]) == (429, "30")
    async with FakeReplica(ready=503).running() as down, running_gateway(down) as running:
        answer = await running.ask()
        assert answer.status == 503
        assert answer.headers["retry-after"] == "5"


async def test_requests_wait_for_a_place_and_those_too_many_are_refused():
    gate = asyncio.Event()

    async def wait(replica, request, body):
        await gate.wait()
        return web.json_response({})

    config = msgspec.structs.replace(QUICK, queue=msgspec.structs.replace(QUICK.queue, max_wait_seconds=10))
    async with (
        FakeReplica(answer=wait).running() as slow,
        running_gateway(slow, config=config, max_in_flight=1) as running,
    ):
        asked = [asyncio.create_task(running.ask()) for _ in range(3)]
        await until(lambda: len(slow.received) == 1 and waiting(running) == 2)
        refused = await running.ask()
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) >= 1
        gate.set()
        assert [(await task).status for task in asked] == [200] * 3


async def test_before_anything_was_observed_the_oldest_request_is_expected_to_take_as_long_again():
    dispatcher, clock = one_place()
    held = await dispatcher.acquire(Wish(make_query()))
    clock.now += 7.0
    with pytest.raises(Overloaded) as caught:
        await dispatcher.acquire(Wish(make_query(), Urgency(deadline=clock.now)))
    assert caught.value.retry_after_seconds == pytest.approx(7.0)
    held.is_answered = True
    held.release()
    held = await dispatcher.acquire(Wish(make_query()))
    clock.now += 0.1
    # Now it is known how long a request takes.
    with pytest.raises(Overloaded) as caught:
        await dispatcher.acquire(Wish(make_query(), Urgency(deadline=clock.now)))
    assert caught.value.retry_after_seconds == pytest.approx(6.9)
    held.release()


async def test_a_request_that_nobody_answered_says_nothing_of_how_long_they_take():
    dispatcher, clock = one_place()
    (await dispatcher.acquire(Wish(make_query()))).release()  # refused at once
    held = await dispatcher.acquire(Wish(make_query()))
    clock.now += 4.0
    with pytest.raises(Overloaded) as caught:
        await dispatcher.acquire(Wish(make_query(), Urgency(deadline=clock.now)))
    assert caught.value.retry_after_seconds == pytest.approx(4.0)
    held.release()


async def test_a_foreign_refusal_without_a_time_gets_that_of_the_next_probe():
    health = msgspec.structs.replace(QUICK.health, probe_seconds=3.0)
    config = msgspec.structs.replace(QUICK, health=health)
    async with (
        FakeReplica(answer=refuse(429)).running() as one,
        running_gateway(one, kind="vllm", config=config) as running,
    ):
        answer = await running.ask()
        assert (answer.status, answer.headers["retry-after"]) == (429, "3")


@pytest.fixture
async def full():
    """A gateway whose only replica has all it may have; set the event and it answers."""
    gate = asyncio.Event()

    async def wait(replica, request, body):
        await gate.wait()
        return web.json_response({})

    patient = msgspec.structs.replace(QUICK.queue, max_wait_seconds=60, max_waiting_per_tenant=10)
    config = msgspec.structs.replace(QUICK, queue=patient)
    async with (
        FakeReplica(answer=wait).running() as slow,
        running_gateway(slow, config=config, max_in_flight=1) as running,
    ):
        first = asyncio.create_task(running.ask())
        await until(lambda: len(slow.received) == 1)
        yield running, slow, gate
        gate.set()
        await first


@pytest.mark.parametrize("wish", [{"deadline_ms": 60}, {"targets": {"ttft_ms": 60}}])
async def test_a_wait_ends_with_429_when_the_callers_time_is_up(full, wish):
    running, slow, _ = full
    answer = await running.ask(**wish)
    assert (answer.status, (await answer.json())["error"]["code"]) == (429, "overloaded")
    assert int(answer.headers["retry-after"]) >= 1
    assert len(slow.received) == 1


async def test_a_best_effort_waits_beyond_its_target(full):
    running, _, gate = full
    asked = asyncio.create_task(running.ask(targets={"ttft_ms": 20}, best_effort=True))
    await until(lambda: waiting(running) == 1)
    await asyncio.sleep(0.05)
    gate.set()
    assert (await asked).status == 200


async def test_a_replica_is_told_the_time_that_is_left(full):
    running, slow, gate = full
    wish = {"deadline_ms": 50_000, "targets": {"ttft_ms": 40_000, "time_per_token_ms": 50}}
    asked = asyncio.create_task(running.ask(**wish))
    await until(lambda: waiting(running) == 1)
    await asyncio.sleep(0.05)
    gate.set()
    assert (await asked).status == 200
    sent = slow.received[1]
    assert sent["deadline_ms"] <= 49_950
    assert sent["targets"]["ttft_ms"] <= 39_950
    assert sent["targets"]["time_per_token_ms"] == 50


async def test_requests_of_a_higher_priority_go_first_and_the_nearest_deadline_among_equals(full):
    running, slow, gate = full
    wishes = [
        {"user": "plain"},
        {"user": "late", "deadline_ms": 50_000},
        {"user": "soon", "deadline_ms": 30_000},
        {"user": "first", "priority": 3},
    ]
    asked = []
    for number, wish in enumerate(wishes, start=1):
        asked.append(asyncio.create_task(running.ask(**wish)))
        await until(lambda number=number: waiting(running) == number)
    gate.set()
    await asyncio.gather(*asked)
    assert [body["user"] for body in slow.received[1:]] == ["first", "soon", "late", "plain"]


async def test_who_could_only_be_served_too_late_is_refused_at_once_with_the_time_to_come_back():
    dispatcher, clock = one_place()
    wish = Wish(make_query())
    held = await dispatcher.acquire(wish)
    waiters = [asyncio.create_task(dispatcher.acquire(wish)) for _ in range(4)]
    await asyncio.sleep(0)
    for _ in range(2):  # a place every two seconds
        clock.now += 2.0
        held.release()
        await asyncio.sleep(0)
        held = await waiters.pop(0)
    # Two wait and one is served: the next has its turn in six seconds.
    with pytest.raises(Overloaded) as caught:
        await dispatcher.acquire(Wish(make_query(), Urgency(deadline=clock.now + 5.9)))
    assert caught.value.retry_after_seconds == pytest.approx(6.0)
    late = asyncio.create_task(dispatcher.acquire(Wish(make_query(), Urgency(deadline=clock.now + 6.1))))
    await asyncio.sleep(0)
    assert not late.done()
    for task in (late, *waiters):
        task.cancel()
    await asyncio.gather(late, *waiters, return_exceptions=True)


async def test_a_request_is_held_for_as_long_as_is_stated_and_no_longer():
    queue = msgspec.structs.replace(QUICK.queue, hold_seconds=0.3)
    config = FleetConfig(health=QUICK.health, queue=queue, models={"tiny": ModelSection(policy="round-robin")})
    async with running_gateway(config=config) as running:
        began = asyncio.get_running_loop().time()
        answer = await running.ask()
        assert (answer.status, answer.headers["retry-after"]) == (503, "5")
        assert asyncio.get_running_loop().time() - began >= 0.3


async def test_a_request_is_held_until_its_model_comes_up():
    config = FleetConfig(health=QUICK.health, models={"tiny": ModelSection(policy="round-robin")})
    async with FakeReplica().running() as late, running_gateway(config=config) as running:
        asked = asyncio.create_task(running.ask())
        await until(lambda: waiting(running) == 1)
        running.gateway.registration.register(ReplicaEntry(url=late.url))
        assert (await asked).status == 200


async def test_a_broken_stream_of_a_foreign_server_ends_with_an_error_event():
    async def break_off(replica, request, body):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(chunk("one"))
        await asyncio.sleep(0.05)
        request.transport.close()
        return response

    async with FakeReplica(answer=break_off).running() as one, running_gateway(one, kind="vllm") as running:
        events = events_in(await (await running.ask(stream=True)).read())
        assert events[0]["choices"][0]["text"] == "one"
        assert events[-1]["error"]["code"] == "engine_failed"
        assert FRAMES_HEADER not in one.headers[0]


async def test_the_error_event_of_a_stream_that_broke_within_an_event_is_an_event_of_its_own():
    async def break_off(replica, request, body):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(chunk("one") + b'data: {"choi')
        await asyncio.sleep(0.05)
        request.transport.close()
        return response

    async with FakeReplica(answer=break_off).running() as one, running_gateway(one, kind="vllm") as running:
        whole, half, error = (await (await running.ask(stream=True)).read()).strip().split(b"\n\n")
        assert (whole + b"\n\n", half) == (chunk("one"), b'data: {"choi')
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "engine_failed"


@pytest.mark.parametrize("with_error", [False, True])
@pytest.mark.parametrize("fails_after", [0, 1, 3])
async def test_a_broken_framed_stream_goes_on_elsewhere(fails_after, with_error):
    words = ("one ", "two ", "three ", "four")
    async with (
        FakeReplica(answer=framed(*words, fails_after=fails_after, with_error=with_error)).running() as bad,
        FakeReplica(answer=framed(*words)).running() as good,
        running_gateway(bad, good) as running,
    ):
        for _ in range(2):
            events = events_in(await (await running.ask(stream=True)).read())
            assert text_of(events) == "one two three four"
            assert events[-1] == "[DONE]"
        begun = [body["continue_from"] for body in good.received if "continue_from" in body]
        told = {"id": "cmpl-1", "created": 5, "token_ids": [[*range(fails_after)]]}
        assert all(item == told for item in begun)
        assert bool(begun) == bool(fails_after)


async def test_a_decision_on_a_moved_stream_tells_what_the_last_replica_says_of_the_callers_prompt():
    async with (
        FakeReplica(answer=framed("a", "b", fails_after=1, note="40 32 16 ")).running() as bad,
        FakeReplica(answer=framed("a", "b", note="40 16 16 ")).running() as good,
        running_gateway(bad, good) as running,
    ):
        while not bad.received:
            await running.ask(stream=True)
        (decision,) = running.gateway.context.decisions.newest(1)
    assert (decision.replica, decision.resumptions) == (good.name, 1)
    assert (decision.prompt_tokens, decision.cached_tokens) == (40, 16)


async def test_a_stream_that_breaks_every_replica_is_given_up():
    replicas = [FakeReplica(answer=framed("one ", "two", fails_after=1)) for _ in range(5)]
    async with all_running(replicas), running_gateway(*replicas) as running:
        events = events_in(await (await running.ask(stream=True)).read())
        assert text_of(events[:1]) == "one "
        assert events[-1]["error"]["code"] == "engine_failed"
        assert sum(len(replica.received) for replica in replicas) <= 4


@pytest.mark.parametrize(("num_tokens", "most"), [(1, 4), (8, 17)])
async def test_a_stream_that_breaks_every_replica_further_on_is_given_up_and_has_none_ejected(num_tokens, most):
    async def die_further_on(replica, request, body):
        response = web.StreamResponse(headers={"content-type": "text/event-stream", FRAMES_HEADER: "lease-1"})
        await response.prepare(request)
        await response.write(frame(chunk("word "), ChoiceTokens(0, [7] * num_tokens)))
        await asyncio.sleep(0)
        request.transport.close()
        return response

    replicas = [FakeReplica(answer=die_further_on) for _ in range(3)]
    async with all_running(replicas), running_gateway(*replicas) as running:
        events = events_in(await (await running.ask(stream=True)).read())
        assert events[-1]["error"]["code"] == "engine_failed"
        assert sum(len(replica.received) for replica in replicas) == most
        assert [replica.breaker.num_ejections for replica in running.gateway.pool] == [0, 0, 0]


@pytest.mark.parametrize(
    "garbage",
    [
        frame(b"data: hello\n\n", ChoiceTokens(0, [12])),
        frame(b'data: {"choices": []}\n\n', ChoiceTokens(0, [12])),
        frame(b"", ChoiceTokens(0, [12])),
        frame(chunk("x"), ChoiceTokens(0, [10**50])),
        b": 0 " + b"9" * 5000 + b"\n",
    ],
)
async def test_garbage_in_frames_is_its_replicas_failure(garbage):
    async def answer(replica, request, body):
        response = web.StreamResponse(headers={"content-type": "text/event-stream", FRAMES_HEADER: "lease-1"})
        await response.prepare(request)
        await response.write(garbage)
        await asyncio.sleep(0.02)
        request.transport.close()
        return response

    words = ("one ", "two")
    async with (
        FakeReplica(answer=answer).running() as bad,
        FakeReplica(answer=framed(*words)).running() as good,
        running_gateway(bad, good) as running,
    ):
        while not bad.received:
            events = events_in(await (await running.ask(stream=True)).read())
        assert text_of(events) == "one two"
        assert events[-1] == "[DONE]"
        assert "continue_from" not in good.received[-1]


async def test_an_unexpected_failure_in_the_middle_of_a_stream_ends_it_with_an_error_event(monkeypatch, caplog):
    async def fail(self, placement, upstream):
        await self._downstream.write(b'data: {"choi')
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(proxy.FramedStream, "follow", fail)
    async with FakeReplica(answer=framed("one")).running() as one, running_gateway(one) as running:
        half, error = (await (await running.ask(stream=True)).read()).strip().split(b"\n\n")
        assert half == b'data: {"choi'
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "internal_error"
    assert "unforeseen" in caplog.text


async def test_both_replicas_of_a_moved_stream_get_one_seed():
    async with (
        FakeReplica(answer=framed("a", "b", fails_after=1)).running() as bad,
        FakeReplica(answer=framed("a", "b")).running() as good,
        running_gateway(bad, good) as running,
    ):
        while not bad.received:
            await running.ask(stream=True)
        assert bad.headers[-1][FRAMES_HEADER] in [headers[FRAMES_HEADER] for headers in good.headers]


async def test_a_moved_stream_keeps_what_was_promised_behind_its_first_token():
    wish = {"targets": {"ttft_ms": 40_000, "time_per_token_ms": 50}, "deadline_ms": 50_000}
    async with (
        FakeReplica(answer=framed("a", "b", fails_after=1)).running() as bad,
        FakeReplica(answer=framed("a", "b")).running() as good,
        running_gateway(bad, good) as running,
    ):
        while not bad.received:
            await running.ask(stream=True, **wish)
        (moved,) = [body for body in good.received if "continue_from" in body]
        assert moved["targets"]["time_per_token_ms"] == 50
        assert moved["deadline_ms"] < 50_000
        assert "best_effort" not in moved


async def test_a_stream_whose_only_replica_dies_goes_on_when_it_is_back():
    words = ("one ", "two ", "three")
    queue = msgspec.structs.replace(QUICK.queue, hold_seconds=60.0)

    async def die_after_a_word(replica, request, body):
        response = web.StreamResponse(headers={"content-type": "text/event-stream", FRAMES_HEADER: "lease-1"})
        await response.prepare(request)
        await response.write(frame(chunk(words[0]), ChoiceTokens(0, [0])))
        await asyncio.sleep(0.02)
        await replica.die()
        return response

    replica = FakeReplica(answer=die_after_a_word)
    async with (
        replica.running(),
        running_gateway(replica, config=msgspec.structs.replace(QUICK, queue=queue)) as running,
    ):
        stream = asyncio.create_task(whole_stream(running))
        pool = running.gateway.pool
        await until(lambda: pool.find(replica.url).breaker.standing.value == "ejected" and waiting(running) == 1)
        replica.answer = framed(*words)
        async with replica.running():
            events = events_in(await stream)
        assert text_of(events) == "".join(words)
        assert events[-1] == "[DONE]"


async def whole_stream(running):
    return await (await running.ask(stream=True)).read()


async def test_a_dead_replica_is_ejected_and_returns():
    replica = FakeReplica()
    async with replica.running():
        pass  # only to have a port, which is closed now
    async with FakeReplica().running() as other, running_gateway(replica, other) as running:
        pool = running.gateway.pool
        assert {(await running.ask()).status for _ in range(4)} == {200}
        assert pool.find(replica.url).breaker.standing.value == "ejected"
        async with replica.running():
            await until(lambda: pool.find(replica.url).is_up)
            replica.received.clear()
            await until_asked(running, replica)


async def test_an_idle_replica_that_came_back_is_ready_after_a_few_probes():
    replica = FakeReplica()
    async with replica.running():
        pass  # only to have a port, which is closed now
    async with FakeReplica().running() as other, running_gateway(replica, other) as running:
        breaker = running.gateway.pool.find(replica.url).breaker
        assert breaker.standing.value == "ejected"
        async with replica.running():
            await until(lambda: breaker.standing.value == "ready")
        assert not replica.received


async def test_a_replica_that_hangs_delays_nobody_elses_return():
    async def hang(reader, writer):
        await reader.read()
        writer.close()

    hanging = await asyncio.start_server(hang, "127.0.0.1", 0)
    late = FakeReplica(ready=503)
    config = msgspec.structs.replace(
        QUICK, replicas=(ReplicaEntry(url=f"http://127.0.0.1:{hanging.sockets[0].getsockname()[1]}"),)
    )
    health = msgspec.structs.replace(QUICK.health, probe_timeout_seconds=0.2)
    config = msgspec.structs.replace(config, health=health)
    async with hanging, late.running(), running_gateway(late, config=config) as running:
        monitor = running.gateway.monitor
        monitor._timeout = aiohttp.ClientTimeout(total=60)
        await asyncio.sleep(0.3)  # now one probe hangs for a minute
        late.ready = 200
        await until(lambda: running.gateway.pool.find(late.url).is_up)


async def test_a_request_has_one_id_all_the_way():
    async with FakeReplica().running() as one, running_gateway(one) as running:
        running.client.headers["X-Request-Id"] = "mine-1"
        answer = await running.ask()
        assert answer.headers.getall("x-request-id") == ["mine-1"]
        assert one.headers[0]["x-request-id"] == "mine-1"
        assert "server" not in answer.headers


async def test_a_caller_who_leaves_a_stream_is_no_error(caplog):
    async def talk(replica, request, body):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(chunk("more"))
            await asyncio.sleep(0.001)

    async with FakeReplica(answer=talk).running() as one, running_gateway(one) as running:
        body = {"model": "tiny", "stream": True}
        response = await running.client.post(f"{running.url}/v1/completions", json=body)
        await response.content.readany()
        response.close()
        await until(lambda: running.gateway.pool.find(one.url).num_in_flight == 0)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_caller_who_leaves_frees_the_replica():
    async def never(replica, request, body):
        await asyncio.Event().wait()

    async with FakeReplica(answer=never).running() as one, running_gateway(one) as running:
        task = asyncio.create_task(running.ask())
        await until(lambda: one.received)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: running.gateway.pool.find(one.url).num_in_flight == 0)


async def test_keys_are_checked_and_never_reach_a_foreign_server():
    digest = hashlib.sha256(b"secret").hexdigest()
    ring = KeyRing((ApiKey("alice", digest, KeyTerms(models=("tiny",))),), needs_keys=True)
    async with (
        FakeReplica(models=("tiny", "big")).running() as one,
        running_gateway(one, ring=ring, kind="vllm") as running,
    ):
        assert (await running.ask()).status == 401
        running.client.headers["Authorization"] = "Bearer secret"
        assert (await running.ask()).status == 200
        assert "authorization" not in one.headers[0]
        assert (await running.ask(model="big")).status == 404
        assert (await running.client.get(f"{running.url}/metrics")).status == 403
        assert (await running.client.get(f"{running.url}/admin/replicas")).status == 403


ADMIN_ROUTES = {
    ("GET", "/admin/replicas"): "", ("POST", "/admin/replicas"): "", ("DELETE", "/admin/replicas"): "url",
    ("GET", "/admin/decisions"): "limit", ("GET", "/admin/rollout"): "", ("GET", "/admin/rollout.md"): "",
    ("POST", "/admin/rollout"): "", ("DELETE", "/admin/rollout"): "model", ("GET", "/admin/autoscaler"): "",
    ("GET", "/admin/autoscaler/tiny"): "",
}  # fmt: skip


@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
async def test_admin_routes_refuse_parameters_that_they_do_not_know(admin_gateway, method, path):
    known = ADMIN_ROUTES[method, path]
    answer = await admin_gateway.client.request(method, f"{admin_gateway.url}{path}?limt=5")
    error = (await answer.json())["error"]
    assert (answer.status, error["param"]) == (400, "limt")
    right = f"the query may have: {known}" if known else "there is none that the query could have here"
    assert error["message"] == f"unknown parameter 'limt'; {right}"


async def test_admin_routes_refuse_a_parameter_that_stands_twice(admin_gateway):
    answer = await admin_gateway.client.get(f"{admin_gateway.url}/admin/decisions?limit=1&limit=2")
    assert (answer.status, (await answer.json())["error"]["param"]) == (400, "limit")


async def test_who_may_not_use_an_admin_route_learns_nothing_of_its_parameters(admin_gateway):
    admin_gateway.client.headers["authorization"] = "Bearer other"
    assert (await admin_gateway.client.get(f"{admin_gateway.url}/admin/replicas?x=1")).status == 401


@pytest.fixture
async def admin_gateway():
    """A gateway whose caller may do everything."""
    key = ApiKey("boss", hashlib.sha256(b"boss").hexdigest(), KeyTerms(admin=True))
    async with running_gateway(ring=KeyRing((key,), needs_keys=True)) as running:
        running.client.headers["authorization"] = "Bearer boss"
        yield running


@pytest.mark.parametrize(("family", "status"), [(socket.AF_INET, 404), (socket.AF_UNIX, 200)])
async def test_without_keys_the_admin_routes_are_on_a_unix_socket_only(tmp_path, family, status):
    admin = socket.socket(family)
    admin.bind(("127.0.0.1", 0) if family == socket.AF_INET else str(tmp_path / "admin.sock"))
    connector = aiohttp.UnixConnector(admin.getsockname()) if family == socket.AF_UNIX else None
    url = "http://admin" if connector else f"http://127.0.0.1:{admin.getsockname()[1]}"
    gateway = Gateway(QUICK)
    await gateway.start(socket.create_server(("127.0.0.1", 0)), admin, drain_seconds=0.5)
    try:
        async with aiohttp.ClientSession(connector=connector) as client:
            assert (await client.get(f"{url}/admin/replicas")).status == status
    finally:
        await gateway.stop()


async def test_without_keys_the_public_port_has_no_admin_routes():
    async with FakeReplica().running() as one, running_gateway(one) as running:
        assert (await running.client.get(f"{running.url}/admin/replicas")).status == 404


@pytest.mark.parametrize(
    ("body", "kind", "status", "field"),
    [
        (b"{", "application/json", 400, None),
        (b"[]", "application/json", 400, None),
        (b"{}", "application/json", 400, "model"),
        (b'{"model": 5}', "application/json", 400, "model"),
        (b'{"model": "tiny", "n": "two"}', "application/json", 400, "n"),
        (b'{"model": "tiny"}', "text/plain", 415, None),
        (b'{"model": "tiny", "prompt": "%b"}' % (b"x" * 5000), "application/json", 413, None),
    ],
)
async def test_bodies_that_nobody_could_route_are_refused(body, kind, status, field):
    async with FakeReplica().running() as one, running_gateway(one) as running:
        url = f"{running.url}/v1/completions"
        response = await running.client.post(url, data=body, headers={"content-type": kind})
        assert response.status == status
        error = (await response.json())["error"]
        assert error["code"]
        assert error["param"] == field
        assert not one.received


@pytest.mark.parametrize("path", ["completions", "files", "batches"])
async def test_compressed_bodies_are_refused_unread(path):
    bomb = gzip.compress(b'{"model": "tiny", "prompt": "' + b"x" * 1_000_000 + b'"}')
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    async with FakeReplica().running() as one, running_gateway(one) as running:
        response = await running.client.post(f"{running.url}/v1/{path}", data=bomb, headers=headers)
        assert (response.status, (await response.json())["error"]["code"]) == (415, "unsupported_media_type")
        assert not one.received


async def test_a_body_that_is_not_compressed_as_it_says_is_refused_without_a_traceback(caplog):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    async with FakeReplica().running() as one, running_gateway(one) as running:
        response = await running.client.post(f"{running.url}/v1/completions", data=b"{}", headers=headers)
        assert response.status == 415
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_llama_cpp_server_is_not_asked_for_its_models_while_it_answers(monkeypatch):
    answered = asyncio.Event()

    async def answer_late(replica, request, body):
        await answered.wait()
        return await say_hello(replica, request, body)

    # As llama-cpp-python's: no /health, and what asks it for models would break off the stream.
    replica = FakeReplica(answer=answer_late, ready=404)
    async with replica.running(), running_gateway(replica, kind="llama.cpp") as running:
        monitor, asked = running.gateway.monitor, []
        ask = monitor._ask
        monkeypatch.setattr(monitor, "_ask", lambda replica, path: asked.append(path) or ask(replica, path))
        call = asyncio.create_task(running.ask())
        await until(lambda: replica.received)
        asked.clear()
        for _ in range(12):
            await monitor.probe_all()
        assert set(asked) == {"/health", "/metrics"}
        answered.set()
        assert (await call).status == 200
        for _ in range(12):
            await monitor.probe_all()
        assert "/v1/models" in asked


async def test_no_path_leads_past_the_api():
    async with FakeReplica().running() as one, running_gateway(one) as running:
        for path in ("/v1/../metrics", "/v1/%2e%2e/metrics", "/tokenize", "/v1/a%0d%0ab"):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
            writer.write(f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n".encode())
            status = await reader.readline()
            assert b" 404 " in status or b" 400 " in status or b" 415 " in status, path
            writer.close()
        assert not one.received


async def test_a_replica_that_does_not_know_its_model_any_more_is_asked_again_with_the_next_probe():
    async def forget(replica, request, body):
        return web.json_response({"error": {"message": "no such model", "code": 404}}, status=404)

    config = msgspec.structs.replace(QUICK, health=msgspec.structs.replace(QUICK.health, probe_seconds=60.0))
    async with FakeReplica().running() as one, running_gateway(one, config=config) as running:
        await running.gateway.monitor.probe_all()
        one.models, one.answer = ("other",), forget
        await running.gateway.monitor.probe_all()
        assert (await running.ask()).status == 404  # nobody could know
        await running.gateway.monitor.probe_all()
        assert sorted(running.gateway.pool.models()) == ["other"]


class HangingReplica(FakeReplica):
    """As a machine that is gone, it sends nothing any more once it was asked for something; nor does it hang up."""

    async def _ready(self, request):
        if self.received:
            await asyncio.sleep(60)
        return await super()._ready(request)


class StalledReplica(FakeReplica):
    """Its engine stands still once it was asked for something."""

    async def _ready(self, request):
        if self.received:
            return web.json_response({"error": {"code": "engine_stalled"}}, status=503)
        return await super()._ready(request)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("kind", [HangingReplica, StalledReplica])
async def test_what_a_replica_of_which_nothing_is_heard_had_goes_on_elsewhere(kind, streams):
    async def begin(replica, request, body):
        response = web.StreamResponse(headers={"content-type": "text/event-stream", FRAMES_HEADER: "lease-1"})
        if streams:
            await response.prepare(request)
            await response.write(frame(chunk("one "), ChoiceTokens(0, [0])))
        await asyncio.sleep(60)
        return response

    health = msgspec.structs.replace(QUICK.health, probe_timeout_seconds=0.2)
    config = msgspec.structs.replace(QUICK, health=health)
    good = FakeReplica(answer=framed("one ", "two")) if streams else FakeReplica()
    async with (
        kind(answer=begin).running() as lost,
        good.running(),
        running_gateway(lost, good, config=config) as running,
    ):
        running.gateway.pool.find(good.url).num_in_flight = 9  # so that the other gets it
        answered = await running.ask(stream=streams)
        assert answered.status == 200 and len(lost.received) == len(good.received) == 1
        if streams:
            events = events_in(await answered.read())
            assert (text_of(events), events[-1]) == ("one two", "[DONE]")


# One probe that runs out must do: no number of them would eject within a test.
PATIENT = msgspec.structs.replace(
    QUICK, health=msgspec.structs.replace(QUICK.health, probe_timeout_seconds=0.3, failures_to_eject=1000)
)


async def never_answer(replica, request, body):
    await asyncio.sleep(60)
    return web.Response()


async def test_who_waits_for_a_replica_that_says_nothing_at_all_is_answered_by_another():
    async with (
        HangingReplica(answer=never_answer).running() as stopped,
        FakeReplica().running() as good,
        running_gateway(stopped, good, config=PATIENT) as running,
    ):
        found = running.gateway.pool.find
        found(good.url).num_in_flight = 9  # so that the other gets it
        await asyncio.sleep(0.3)
        assert (await running.ask()).status == 200
        assert len(stopped.received) == len(good.received) == 1
        breaker = found(stopped.url).breaker
        assert breaker.num_ejections == 1 and "nothing at all was heard of it for 0.3 s" in breaker.reason


async def test_who_waits_for_one_that_left_and_stands_still_is_answered_by_another():
    async with (
        HangingReplica(answer=never_answer).running() as stopped,
        FakeReplica().running() as good,
        running_gateway(good, config=PATIENT) as running,
    ):
        pool = running.gateway.pool
        replica = pool.add("registration", ReplicaEntry(url=stopped.url))
        await until(lambda: replica.is_usable)
        pool.find(good.url).num_in_flight = 9  # so that the other gets it
        asked = asyncio.create_task(running.ask())
        await until(lambda: stopped.received)
        pool.remove("registration", stopped.url, "gone")  # its lease ran out
        assert (await asyncio.wait_for(asked, 15.0)).status == 200
        assert len(good.received) == 1


async def test_a_replica_whose_answers_flow_is_not_ejected_for_a_late_probe():
    async def flow(replica, request, body):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(20):
            await response.write(b'data: {"a": 1}\n\n')
            await asyncio.sleep(0.05)
        await response.write(b"data: [DONE]\n\n")
        return response

    async with (
        HangingReplica(answer=flow).running() as busy,
        FakeReplica().running() as good,
        running_gateway(busy, good, config=PATIENT) as running,
    ):
        found = running.gateway.pool.find
        found(good.url).num_in_flight = 9
        await asyncio.sleep(0.3)
        answered = await running.ask(stream=True)
        assert events_in(await answered.read())[-1] == "[DONE]"
        assert found(busy.url).breaker.num_ejections == 0 and not good.received


async def test_nobody_is_ejected_for_silence_where_no_other_could_answer():
    async with HangingReplica(answer=never_answer).running() as only, running_gateway(only, config=PATIENT) as running:
        await asyncio.sleep(0.3)
        asked = asyncio.create_task(running.ask())
        await asyncio.sleep(1.0)
        assert running.gateway.pool.find(only.url).breaker.num_ejections == 0
        asked.cancel()


async def test_a_gateway_that_stood_still_itself_ejects_nobody():
    class SlowReplica(FakeReplica):
        async def _ready(self, request):
            await asyncio.sleep(0.1)
            return await super()._ready(request)

    async with (
        SlowReplica().running() as one,
        SlowReplica().running() as other,
        running_gateway(one, other, config=PATIENT) as running,
    ):
        await asyncio.sleep(0.3)
        for _ in range(3):
            time.sleep(0.8)  # noqa: ASYNC251 - the whole event loop stands still
            await asyncio.sleep(0.3)
        assert [running.gateway.pool.find(item.url).breaker.num_ejections for item in (one, other)] == [0, 0]


@pytest.mark.parametrize("streams", [True, False])
async def test_who_is_not_answered_within_the_drain_is_told_so(streams):
    async def never_end(replica, request, body):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        if streams:
            await response.prepare(request)
            await response.write(b'data: {"a": 1}\n\n')
        await asyncio.sleep(60)
        return response

    async with FakeReplica(answer=never_end).running() as one, running_gateway(one) as running:
        body = {"model": "tiny", "prompt": "hi", "stream": streams}
        asked = asyncio.create_task(running.client.post(f"{running.url}/v1/completions", json=body))
        await until(lambda: one.received)
        if streams:
            await (await asked).content.readline()
        stopping = asyncio.create_task(running.gateway.stop())
        answer = await asked
        text = await answer.text()
        assert answer.status == (200 if streams else 503)
        assert "the gateway was ended before the answer was" in text and "[DONE]" not in text
        await stopping


async def test_what_servers_have_for_operators_is_not_for_callers():
    async with FakeReplica().running() as one, running_gateway(one) as running:
        for path in ("load_lora_adapter", "unload_lora_adapter", "internal/model/load", "completions/", "/completions"):
            response = await running.client.post(f"{running.url}/v1/{path}", json={"model": "tiny", "prompt": "a"})
            assert (response.status, (await response.json())["error"]["code"]) == (404, "route_not_found"), path
        assert not one.received
        assert (await running.client.post(f"{running.url}/v1/rerank", json={"model": "tiny"})).status == 200


async def test_the_metrics_are_those_of_the_document():
    async with FakeReplica().running() as one, running_gateway(one) as running:
        await running.ask()
        text = await (await running.client.get(f"{running.url}/metrics")).text()
        exposed = {family.name for family in text_string_to_metric_families(text)}
        documented = set(re.findall(r"^\| `(penstock_gateway_\w+)", DOCUMENT.read_text(), flags=re.MULTILINE))
        assert exposed == {name.removesuffix("_total") for name in documented}


@pytest.mark.parametrize("rest", ["NaN", '{model="a", ="b"} 1', "1\n" + "# much\n" * 200_000])
async def test_a_replica_whose_metrics_cannot_be_read_is_served_from_and_probed_like_the_others(rest, caplog):
    metrics = f"penstock_total_running_requests {rest}\n"
    async with (
        FakeReplica().running() as one,
        FakeReplica(metrics=metrics).running() as odd,
        running_gateway(one, odd) as running,
    ):
        assert [(await running.ask()).status for _ in range(2)] == [200, 200]
        one.ready = odd.ready = 503
        await until(lambda: not any(replica.is_up for replica in running.gateway.pool))
    assert [record.message for record in caplog.records].count(UNREADABLE) == 1


async def test_loads_are_read_from_the_replicas_metrics():
    metrics = "penstock_total_running_requests 3\npenstock_total_queued_requests 2\n"
    async with FakeReplica(metrics=metrics).running() as one, running_gateway(one) as running:
        assert running.gateway.pool.find(one.url).busyness == 5


def one_place():
    """A dispatcher over one replica that takes one request at a time, and its clock."""
    clock = FakeClock()
    pool = ReplicaPool(QUICK.health, clock)
    queue = msgspec.structs.replace(QUICK.queue, max_waiting_per_tenant=10, max_wait_seconds=60.0)
    replica = pool.add("test", ReplicaEntry(url="http://replica:80", max_in_flight=1))
    replica.models = (ServedModel("tiny"),)
    replica.breaker.on_probe(True)
    return Dispatcher(FleetConfig(queue=queue), pool), clock


def waiting(running):
    return running.gateway.context.dispatcher.num_waiting


@contextlib.asynccontextmanager
async def all_running(replicas):
    async with contextlib.AsyncExitStack() as stack:
        for replica in replicas:
            await stack.enter_async_context(replica.running())
        yield


async def until_asked(running, replica):
    for _ in range(100):
        await running.ask()
        if replica.received:
            return
    raise AssertionError("it was never asked again")
