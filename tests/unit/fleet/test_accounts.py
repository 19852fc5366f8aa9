"""The gateway before servers that know nothing of tenants: it admits and books for them, and for nobody else."""

import asyncio
import contextlib
import gzip
import json
from dataclasses import dataclass

import msgspec
import pytest
from aiohttp import web
from sqlalchemy import func, select

from penstock.fleet.config import ModelSection, ReplicaEntry
from penstock.metering.counts import StoreCounts
from penstock.metering.tenancy import Tenancy
from penstock.protocol.frames import FRAMES_HEADER, ChoiceTokens, frame, last_frame
from penstock.protocol.voucher import VOUCHER_HEADER, read_voucher, sign_voucher
from penstock.store.database import Database
from penstock.store.keys import KeyStore
from penstock.store.ledger import UsageLedger
from penstock.store.schema import leases
from penstock.tenants import ApiKey, KeyTerms, Limits, Voucher
from tests.fakes.fake_replica import FakeReplica
from tests.unit.fleet.conftest import QUICK, running_gateway, until
from tests.unit.server.sse import events_in

USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
CACHED = {**USAGE, "prompt_tokens_details": {"cached_tokens": 3}}


@dataclass
class Settings:
    keys: tuple[ApiKey, ...] = ()
    keys_file: str | None = None
    needs_keys: bool = False


@pytest.fixture
async def tenancy(tmp_path):
    tenancy = Tenancy(Settings(), StoreCounts(), Database.open(str(tmp_path / "s.db")))
    yield tenancy
    await tenancy.close()


def give_key(tenancy, models=None, **limits):
    store = KeyStore(tenancy.database)
    secret = store.create("alice", KeyTerms(models=models, limits=Limits(**limits)))
    tenancy.ring.replace(store.load(), needs_keys=True)
    return {"authorization": f"Bearer {secret}"}


def booked(tenancy, tenant="open"):
    """Return requests, prompt, cached and output tokens, refused and errors."""
    (entry,) = UsageLedger(tenancy.database).read(tenant=tenant) or [None]
    if entry is None:
        return None
    counts = (entry.requests, entry.prompt_tokens, entry.cached_tokens, entry.output_tokens)
    return *counts, entry.refused, entry.errors


def num_leases(tenancy):
    with tenancy.database.reading() as connection:
        return connection.execute(select(func.count()).select_from(leases)).scalar_one()


def sharing(tenancy, keys="on"):
    """What a replica on the gateway's store says of itself."""
    return f"server; store={tenancy.store_identity}; keys={keys}"


def answering(document, status=200):
    async def answer(replica, request, body):
        return web.json_response(document, status=status)

    return answer


def streaming(*texts, usage=None, breaks=False):
    async def answer(replica, request, body):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        events = [{"choices": [{"index": 0, "text": text}], "usage": None} for text in ("", *texts)]
        if usage is not None and (body.get("stream_options") or {}).get("include_usage"):
            events.append({"choices": [], "usage": usage})
        for event in events:
            await response.write(b"data: %b\r\n\r\n" % json.dumps(event).encode())
        if breaks:
            await asyncio.sleep(0.05)
            request.transport.close()
            return response
        await response.write(b"data: [DONE]\r\n\r\n")
        return response

    return answer


def events(body):
    return events_in(body.replace(b"\r\n", b"\n"))


async def test_what_a_foreign_answer_tells_of_its_cost_is_booked(tenancy):
    replica = FakeReplica(answer=answering({"choices": [], "usage": CACHED}))
    async with replica.running(), running_gateway(replica, kind="vllm", tenancy=tenancy) as running:
        assert (await running.ask()).status == 200
        assert booked(tenancy) == (1, 7, 3, 5, 0, 0)


@pytest.mark.parametrize("wrong", [b"1e999", b'"\xff"'])
@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        (b'"model": "alias"', "vllm"),
        (b'"model": "tiny", "stream": true', "vllm"),
        (b'"model": "tiny", "deadline_ms": 9000', "penstock"),
    ],
)
async def test_what_is_wrong_where_the_gateway_did_not_look_is_its_callers_mistake(tenancy, wrong, fields, kind):
    config = msgspec.structs.replace(QUICK, aliases={"alias": "tiny"})
    body = b'{%b, "prompt": "x", "temperature": %b}' % (fields, wrong)
    replica = FakeReplica()
    async with replica.running(), running_gateway(replica, kind=kind, tenancy=tenancy, config=config) as running:
        url, headers = f"{running.url}/v1/completions", {"content-type": "application/json"}
        answer = await running.client.post(url, data=body, headers=headers)
        assert (answer.status, (await answer.json())["error"]["code"]) == (400, "invalid_json")
        assert not replica.received and not any(known.num_in_flight for known in running.gateway.pool)


async def test_a_prompt_that_is_nested_too_deeply_to_be_counted_is_its_callers_mistake(tenancy):
    content: list[object] = []
    for _ in range(700):
        content = [content]
    async with FakeReplica().running() as replica, running_gateway(replica, kind="vllm", tenancy=tenancy) as running:
        answer = await running.ask(prompt=None, messages=[{"role": "user", "content": content}])
        assert (answer.status, (await answer.json())["error"]["code"]) == (400, "invalid_json")
        assert not replica.received


@pytest.mark.parametrize("asks", [True, False])
async def test_a_foreign_stream_is_asked_for_its_cost_and_only_who_asked_sees_it(tenancy, asks):
    replica = FakeReplica(answer=streaming("a", "b", usage=USAGE))
    fields = {"stream": True, "stream_options": {"include_usage": True}} if asks else {"stream": True}
    async with replica.running(), running_gateway(replica, kind="vllm", tenancy=tenancy) as running:
        seen = events(await (await running.ask(**fields)).read())
        assert booked(tenancy) == (1, 7, 0, 5, 0, 0)
    assert seen[-1] == "[DONE]"
    assert [event["usage"] for event in seen[:-1] if event["usage"]] == ([USAGE] if asks else [])
    assert [event["choices"][0]["text"] for event in seen[:-1] if event["choices"]] == ["", "a", "b"]


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
async def test_an_answer_whose_cost_nobody_can_read_is_its_servers_failure_and_not_free(tenancy, kind):
    async def packing(replica, request, body):
        return web.Response(body=gzip.compress(b"{}"), headers={"content-encoding": "gzip"}, content_type=kind)

    packer, other = FakeReplica(answer=packing), FakeReplica(answer=answering({"choices": [], "usage": USAGE}))
    async with packer.running(), other.running():
        async with running_gateway(packer, kind="vllm", tenancy=tenancy) as running:
            response = await running.ask()
            assert response.status == 500
            assert "compressed" in (await response.json())["error"]["message"]
            await until(lambda: booked(tenancy) == (0, 0, 0, 0, 0, 1))
        async with running_gateway(packer, other, kind="vllm", tenancy=tenancy) as running:
            assert [(await running.ask()).status for _ in range(2)] == [200] * 2
            assert booked(tenancy) == (2, 14, 0, 10, 0, 1)


async def test_what_a_server_does_not_tell_is_estimated_and_said_to_be(tenancy):
    replica = FakeReplica(answer=streaming("a", "b", "c"))
    async with replica.running(), running_gateway(replica, kind="llama.cpp", tenancy=tenancy) as running:
        await running.ask(stream=True, prompt="x" * 40)
        replica.answer = answering({"choices": [{"text": "y" * 20}]})
        await running.ask(prompt=[1, 2, 3])
        text = await (await running.client.get(f"{running.url}/metrics")).text()
    assert booked(tenancy) == (2, 10 + 3, 0, 3 + 5, 0, 0)
    assert "penstock_gateway_estimated_usage_total 2.0" in text


async def test_a_caller_who_leaves_pays_for_what_was_made(tenancy):
    async def talk(replica, request, body):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(6):
            await response.write(b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n')
        await asyncio.Event().wait()

    replica = FakeReplica(answer=talk)
    async with replica.running(), running_gateway(replica, kind="vllm", tenancy=tenancy) as running:
        body = {"model": "tiny", "prompt": [1, 2], "stream": True}
        response = await running.client.post(f"{running.url}/v1/completions", json=body)
        seen = b""
        while seen.count(b"data:") < 6:
            seen += await response.content.readany()
        response.close()
        await until(lambda: booked(tenancy) is not None)
    assert booked(tenancy) == (1, 2, 0, 6, 0, 0)


async def test_a_penstock_replica_counts_itself_and_nothing_is_counted_twice(tenancy):
    replica = FakeReplica(answer=answering({"choices": [], "usage": USAGE}), identity=sharing(tenancy))
    headers = give_key(tenancy, requests_per_minute=1)
    async with replica.running(), running_gateway(replica, tenancy=tenancy) as running:
        running.client.headers.update(headers)
        assert [(await running.ask()).status for _ in range(3)] == [200] * 3
    assert booked(tenancy, "alice") is None
    assert replica.headers[0]["authorization"] == headers["authorization"]


async def test_a_request_that_a_foreign_server_failed_and_ours_answered_is_not_booked_here(tenancy):
    bad, good = FakeReplica(answer=answering({}, status=500)), FakeReplica(identity=sharing(tenancy))
    headers = give_key(tenancy, requests_per_minute=1)
    async with bad.running(), good.running():
        config = msgspec.structs.replace(QUICK, replicas=(ReplicaEntry(url=bad.url, kind="vllm"),))
        async with running_gateway(good, config=config, tenancy=tenancy) as running:
            running.client.headers.update(headers)
            assert [(await running.ask()).status for _ in range(4)] == [200] * 4
    assert bad.received
    assert booked(tenancy, "alice") is None


async def test_a_limit_is_kept_before_a_foreign_server_and_the_refusal_booked(tenancy):
    replica = FakeReplica(answer=answering({"choices": [], "usage": USAGE}))
    headers = give_key(tenancy, tokens_per_day=30)
    async with replica.running(), running_gateway(replica, kind="vllm", tenancy=tenancy) as running:
        running.client.headers.update(headers)
        # Each may use 7 + 5 and does: the third would be over 30.
        answers = [await running.ask(prompt=[1] * 7, max_tokens=5) for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 429]
        assert (await answers[2].json())["error"]["code"] == "rate_limit_exceeded"
        assert int(answers[2].headers["retry-after"]) > 0
        too_long = await running.ask(prompt=[1] * 20, max_tokens=20)
        assert (await too_long.json())["error"]["code"] == "limit_too_small"
    assert len(replica.received) == 2
    assert booked(tenancy, "alice") == (2, 14, 0, 10, 1, 0)


@pytest.mark.parametrize(("status", "counts"), [(400, (1, 7, 0, 5, 0, 0)), (500, (1, 7, 0, 5, 0, 1))])
async def test_what_a_foreign_server_refuses_or_fails_costs_its_tenant_nothing(tenancy, status, counts):
    replica = FakeReplica(answer=answering({"error": {"message": "no"}}, status=status))
    headers = give_key(tenancy, tokens_per_day=12, concurrent_requests=1)
    async with replica.running(), running_gateway(replica, kind="vllm", tenancy=tenancy) as running:
        running.client.headers.update(headers)
        assert (await running.ask(prompt=[1] * 7, max_tokens=5)).status == status
        replica.answer = answering({"choices": [], "usage": USAGE})
        await until(lambda: num_leases(tenancy) == 0 and running.gateway.pool.find(replica.url).is_usable)
        assert (await running.ask(prompt=[1] * 7, max_tokens=5)).status == 200
    assert booked(tenancy, "alice")[:4] == counts[:4]
    assert booked(tenancy, "alice")[5] == counts[5]


async def test_a_stream_that_breaks_is_paid_as_far_as_it_went(tenancy):
    replica = FakeReplica(answer=streaming("a", "b", breaks=True))
    async with replica.running(), running_gateway(replica, kind="vllm", tenancy=tenancy) as running:
        await running.ask(stream=True, prompt=[1, 2, 3])
        await until(lambda: booked(tenancy) is not None)
    assert booked(tenancy) == (1, 3, 0, 2, 0, 1)


@pytest.mark.parametrize("identity", ["", "server; store=none; keys=on", "server; store=abc; keys=on", "keys off"])
async def test_a_limit_is_kept_before_a_penstock_replica_that_does_not_share_the_store(tenancy, identity, caplog):
    identity = sharing(tenancy, keys="off") if identity == "keys off" else identity
    replica = FakeReplica(answer=answering({"choices": [], "usage": USAGE}), identity=identity)
    headers = give_key(tenancy, tokens_per_day=30)
    async with replica.running(), running_gateway(replica, tenancy=tenancy) as running:
        running.client.headers.update(headers)
        answers = [await running.ask(prompt=[1] * 7, max_tokens=5) for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 429]
    assert booked(tenancy, "alice")[:4] == (2, 14, 0, 10)
    assert replica.headers[0]["authorization"] == headers["authorization"]  # by which it tells tenants apart, if it can
    (line,) = [record for record in caplog.records if "cannot keep this gateway's limits" in record.getMessage()]
    assert (line.levelname, line.penstock_fields["replica"]) == ("WARNING", replica.name)
    assert "--store" in line.getMessage()


def word_frames(*words, breaks_at=None, lease="none"):
    """Answer as a Penstock server: a word a token, and at the end what it cost where that was asked for."""

    async def answer(replica, request, body):
        response = web.StreamResponse(headers={"content-type": "text/event-stream", FRAMES_HEADER: lease})
        await response.prepare(request)
        begun = len(body.get("continue_from", {}).get("token_ids", [[]])[0])
        for place, word in list(enumerate(words))[begun:]:
            if place == breaks_at:
                request.transport.close()
                return response
            document = {"id": "cmpl-1", "created": 5, "choices": [{"index": 0, "text": word}]}
            await response.write(frame(b"data: %b\n\n" % json.dumps(document).encode(), ChoiceTokens(0, [place])))
            await asyncio.sleep(0.01)
        cost = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": len(words)}}
        wants_cost = body.get("stream_options", {}).get("include_usage")
        told = b"data: %b\n\n" % json.dumps(cost).encode() if wants_cost else b""
        await response.write(last_frame(told + b"data: [DONE]\n\n"))
        return response

    return answer


@pytest.mark.parametrize("breaks_at", [None, 2])
async def test_a_framed_stream_that_the_gateway_counts_is_booked_once_and_whole_also_when_it_moves(tenancy, breaks_at):
    headers = give_key(tenancy, concurrent_requests=1)
    first = FakeReplica(answer=word_frames("a", "b", "c", breaks_at=breaks_at))
    second = FakeReplica(answer=word_frames("a", "b", "c"))
    config = msgspec.structs.replace(QUICK, queue=msgspec.structs.replace(QUICK.queue, hold_seconds=10.0))
    async with first.running(), running_gateway(first, tenancy=tenancy, config=config) as running, second.running():
        running.client.headers.update(headers)
        asked = asyncio.create_task(running.ask(stream=True))
        await until(lambda: first.received)
        running.gateway.registration.register(ReplicaEntry(url=second.url))
        seen = events(await (await asked).read())
        assert num_leases(tenancy) == 0
    assert [event["choices"][0]["text"] for event in seen[:-1]] == ["a", "b", "c"]
    assert len(second.received) == (0 if breaks_at is None else 1)
    assert booked(tenancy, "alice") == (1, 2, 0, 3, 0, 0)


async def test_an_answer_that_a_replica_counts_goes_on_only_where_it_is_counted_alike(tenancy):
    headers = give_key(tenancy, requests_per_minute=10)
    ours = FakeReplica(answer=word_frames("a", "b", breaks_at=1), identity=sharing(tenancy))
    other = FakeReplica(answer=word_frames("a", "b"), identity="server; store=none; keys=off")
    async with ours.running(), running_gateway(ours, tenancy=tenancy) as running, other.running():
        running.client.headers.update(headers)
        asked = asyncio.create_task(running.ask(stream=True, stream_options={"include_usage": True}))
        await until(lambda: ours.received)
        running.gateway.registration.register(ReplicaEntry(url=other.url))
        seen = events(await (await asked).read())
    assert seen[-1]["error"]["code"] == "engine_failed"
    assert not other.received


async def test_files_are_kept_only_by_replicas_on_the_gateways_store(tenancy):
    async def keep(replica, request):
        return web.json_response({"kept": True})

    headers = give_key(tenancy)
    replica = FakeReplica(files=keep, identity="server; store=none; keys=off")
    async with replica.running(), running_gateway(replica, tenancy=tenancy) as running:
        answer = await running.client.get(f"{running.url}/v1/files", headers=headers)
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "route_not_found")
        replica.identity = sharing(tenancy)
        await until(lambda: not running.gateway.pool.find(replica.url).is_counted_here)
        assert (await running.client.get(f"{running.url}/v1/files", headers=headers)).status == 200


def vouched(tenancy, replica):
    """Return what the gateway vouched for with each request, in turn."""
    return [
        read_voucher(headers[VOUCHER_HEADER], tenancy.fleet_secret, headers["authorization"])
        for headers in replica.headers
    ]


@pytest.mark.parametrize("breaks_at", [0, 2])
async def test_the_lease_of_a_stream_that_moves_goes_along_with_it(tenancy, breaks_at):
    headers = give_key(tenancy, concurrent_requests=1)
    words = ("a", "b", "c")
    turns = iter([word_frames(*words, breaks_at=breaks_at, lease="lease-1"), word_frames(*words)])

    async def answer(replica, request, body):
        return await next(turns)(replica, request, body)

    replicas = [FakeReplica(answer=answer, identity=sharing(tenancy)) for _ in range(2)]
    async with replicas[0].running(), replicas[1].running(), running_gateway(*replicas, tenancy=tenancy) as running:
        seen = events(await (await running.ask(headers, stream=True)).read())
    assert [event["choices"][0]["text"] for event in seen[:-1]] == ["a", "b", "c"]
    told = [voucher for replica in replicas for voucher in vouched(tenancy, replica)]
    assert sorted(told, key=str) == [Voucher("tiny", "lease-1"), Voucher("tiny")]
    assert booked(tenancy, "alice") is None  # the second replica's to book


@pytest.mark.parametrize("status", [204, 302, 304])
async def test_what_a_foreign_server_sends_without_an_answer_in_it_costs_nothing(tenancy, status):
    async def answer(replica, request, body):
        return web.Response(status=status, headers={"location": "/elsewhere"} if status == 302 else {})

    headers, request = give_key(tenancy, tokens_per_day=12), {"model": "tiny", "prompt": [1] * 7, "max_tokens": 5}
    replica = FakeReplica(answer=answer)
    async with replica.running(), running_gateway(replica, kind="vllm", tenancy=tenancy) as running:
        for _ in range(2):
            url = f"{running.url}/v1/completions"
            async with running.client.post(url, json=request, headers=headers, allow_redirects=False) as answered:
                assert answered.status == status
            await until(lambda: num_leases(tenancy) == 0)
    assert booked(tenancy, "alice") is None


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_request_for_which_no_replica_is_ready_is_an_error_and_not_refused(tenancy, is_known):
    queue = msgspec.structs.replace(QUICK.queue, hold_seconds=0.05)
    models = {"tiny": ModelSection(policy="round-robin")}
    config = msgspec.structs.replace(QUICK, queue=queue, models=models)
    replicas = [FakeReplica()] if is_known else []
    async with contextlib.AsyncExitStack() as stack:
        for replica in replicas:
            await stack.enter_async_context(replica.running())
        running = await stack.enter_async_context(
            running_gateway(*replicas, kind="vllm", tenancy=tenancy, config=config)
        )
        for replica in running.gateway.pool:
            replica.breaker.on_probe(False, "it starts")
            replica.is_leaving = True
        assert (await running.ask()).status == 503
        await until(lambda: booked(tenancy) is not None)
        assert booked(tenancy) == (0, 0, 0, 0, 0, 1)


async def test_a_stream_that_nobody_goes_on_with_is_an_error_in_the_ledger(tenancy):
    headers = give_key(tenancy)
    replica = FakeReplica(answer=word_frames("a", "b", breaks_at=1), identity=sharing(tenancy))
    async with replica.running(), running_gateway(replica, tenancy=tenancy) as running:
        asked = asyncio.create_task(running.ask(headers, stream=True))
        await until(lambda: replica.received)
        replica.answer = answering({}, status=500)
        assert "[DONE]" not in events(await (await asked).read())
        await until(lambda: booked(tenancy, "alice"))
    assert booked(tenancy, "alice") == (0, 0, 0, 0, 0, 1)


async def test_what_a_caller_says_that_the_gateway_vouches_for_goes_nowhere(tenancy):
    headers = give_key(tenancy)
    forged = sign_voucher(Voucher("gpt-4o", "lease-1"), "guessed", headers["authorization"])
    replica = FakeReplica(identity=sharing(tenancy))
    async with replica.running(), running_gateway(replica, tenancy=tenancy) as running:
        await running.ask({**headers, VOUCHER_HEADER: forged})
    assert vouched(tenancy, replica) == [Voucher("tiny")]
    async with replica.running(), running_gateway(replica) as running:
        await running.ask({**headers, VOUCHER_HEADER: forged})
    assert VOUCHER_HEADER not in replica.headers[-1]


ALIASES = msgspec.structs.replace(QUICK, aliases={"gpt-4o": "tiny"})


async def test_a_key_that_allows_an_alias_only_uses_it_where_the_replica_shares_the_store(tenancy):
    headers = give_key(tenancy, models=("gpt-4o",))
    replica = FakeReplica(identity=sharing(tenancy))
    async with replica.running(), running_gateway(replica, config=ALIASES, tenancy=tenancy) as running:
        async with running.client.get(f"{running.url}/v1/models", headers=headers) as listed:
            assert [model["id"] for model in (await listed.json())["data"]] == ["gpt-4o"]
        assert (await running.ask(headers, model="gpt-4o")).status == 200
        assert (await running.ask(headers, model="tiny")).status == 404
    assert [body["model"] for body in replica.received] == ["tiny"]
    assert vouched(tenancy, replica) == [Voucher("gpt-4o")]


@pytest.mark.parametrize("store", ["none", "0123456789abcdef"])
async def test_an_alias_that_the_replica_would_not_know_is_not_listed_and_the_refusal_says_what_to_do(tenancy, store):
    headers = give_key(tenancy, models=("gpt-4o",))
    replica = FakeReplica(identity=f"server; store={store}; keys=on")
    async with replica.running(), running_gateway(replica, config=ALIASES, tenancy=tenancy) as running:
        async with running.client.get(f"{running.url}/v1/models", headers=headers) as listed:
            assert (await listed.json())["data"] == []
        refused = await running.ask(headers, model="gpt-4o")
        assert refused.status == 404
        message = (await refused.json())["error"]["message"]
    assert "--store" in message
    assert "tiny" not in message
    assert replica.received == []


@pytest.mark.parametrize(("kind", "size"), [("application/json", 2 * 1024 * 1024), ("text/event-stream", 10)])
async def test_a_foreign_servers_refusal_costs_nothing_whatever_it_looks_like(tenancy, kind, size):
    async def refuse(replica, request, body):
        return web.Response(status=400, body=b"x" * size, content_type=kind)

    key = give_key(tenancy, tokens_per_day=10_000)
    replica = FakeReplica(answer=refuse)
    async with replica.running(), running_gateway(replica, kind="vllm", tenancy=tenancy) as running:
        for stream in (False, True):
            response = await running.ask(key, stream=stream)
            assert (response.status, len(await response.read())) == (400, size)
        await until(lambda: num_leases(tenancy) == 0)
        assert booked(tenancy, "alice") is None


@pytest.mark.parametrize("limits", [{"tokens_per_day": 10_000}, {"requests_per_minute": 100}])
async def test_more_answers_than_can_ever_fit_are_no_matter_of_time(tenancy, limits):
    key = give_key(tenancy, **limits)
    replica = FakeReplica(answer=answering({"error": {"code": "no"}}, status=400))
    async with replica.running(), running_gateway(replica, kind="vllm", tenancy=tenancy) as running:
        response = await running.ask(key, n=10**33)
        assert response.status == 400
        if "tokens_per_day" in limits:
            assert (await response.json())["error"]["param"] == "n"
