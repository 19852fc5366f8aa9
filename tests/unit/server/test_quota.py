"""Limits over HTTP: refused with a name and an exact wait, settled with the truth, booked before the last byte."""

import asyncio
import contextlib
import hashlib
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest

from penstock.engine.messages import TokenEvent
from penstock.errors import DeadlineExceeded, EngineFailed
from penstock.metering import meter
from penstock.metering.store_thread import StoreThread
from penstock.protocol.frames import FRAMES_HEADER, FrameReader
from penstock.protocol.voucher import VOUCHER_HEADER, sign_voucher
from penstock.request import FinishReason
from penstock.store.database import Database
from penstock.store.key_ring import load_keys
from penstock.store.ledger import UsageLedger
from penstock.store.quotas import Ask, Lease, Need, QuotaStore, Spent, settle
from penstock.tenants import SHADOW_HEADER, SHADOW_TENANT, Caller, KeyTerms, Limits, Voucher
from tests.unit.server.conftest import Service, listening, running_service, until
from tests.unit.server.sse import events_in

MANY = 10**9


@contextlib.asynccontextmanager
async def serving(store: str | None, folder: Path | None = None, **limits: dict[str, int]) -> AsyncIterator[Service]:
    """A server whose tenants have these limits, each with its own name for a key."""
    file = (folder or Path(str(store)).parent) / "keys.toml"
    entries = [
        f'[[keys]]\nname = "{name}"\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n[keys.limits]\n'
        + "".join(f"{limit} = {value}\n" for limit, value in own.items())
        for name, own in limits.items()
    ]
    file.write_text("".join(entries))
    async with running_service(keys=load_keys(str(file)), keys_file=str(file), store=store) as service:
        yield service


@pytest.fixture
def store(tmp_path):
    return str(tmp_path / "penstock.db")


def usage(store):
    """What the ledger has on disk, read as another process would."""
    database = Database.open(store)
    entries = UsageLedger(database).read()
    database.close()
    return {entry.tenant: entry for entry in entries}


def counts(entry):
    return (entry.requests, entry.prompt_tokens, entry.output_tokens, entry.refused, entry.errors)


def tokens_left_today(store, name, limit):
    """How many more tokens the store would admit for a tenant, by asking it."""
    database = Database.open(store)
    terms = KeyTerms(limits=Limits(tokens_per_day=limit))
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        need = Need(input_tokens=0, most_output_tokens=middle, output_is_stated=True)
        (outcome,) = QuotaStore(database).admit([Ask(Caller(name, terms), need)])
        if isinstance(outcome, Lease):
            with database.writing() as connection:
                settle(database, connection, [(outcome, Spent(requests=0))])
            low = middle
        else:
            high = middle - 1
    database.close()
    return low


async def test_a_reached_limit_is_429_with_its_name_and_an_exact_wait(store):
    async with serving(store, alice={"requests_per_minute": 1}) as service:
        assert (await service.chat(key="alice")).status_code == 200
        refused = await service.chat(key="alice")
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert "requests_per_minute = 1" in error["message"]
    wait = int(refused.headers["retry-after-ms"])
    assert 1000 < wait <= 60_000
    assert int(refused.headers["retry-after"]) == -(-wait // 1000)
    assert refused.headers["x-ratelimit-limit-requests"] == "1"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_carry_the_headers_that_openais_clients_read(store, stream):
    limits = {"requests_per_minute": 60, "input_tokens_per_minute": 10_000, "output_tokens_per_minute": 100}
    async with serving(store, alice=limits) as service:
        headers = (await service.complete("hi", key="alice", max_tokens=40, stream=stream)).headers
    assert headers["x-ratelimit-limit-requests"] == "60"
    assert headers["x-ratelimit-remaining-requests"] == "59"
    assert headers["x-ratelimit-reset-requests"] == "1.000s"
    assert headers["x-ratelimit-remaining-output-tokens"] == "60"
    assert headers["x-ratelimit-limit-tokens"] == "100", "the scarcer of input and output"
    assert headers["x-ratelimit-limit-input-tokens"] == "10000"


async def test_a_tenant_without_limits_gets_no_such_headers(store):
    async with serving(store, alice={}) as service:
        headers = (await service.chat(key="alice")).headers
    assert not [name for name in headers if name.startswith("x-ratelimit")]


@pytest.mark.parametrize("limits", [{"output_tokens_per_minute": 10}, {"tokens_per_day": 10}])
async def test_a_request_that_can_never_fit_is_400(store, limits):
    async with serving(store, alice=limits) as service:
        refused = await service.complete("hi", key="alice", max_tokens=50)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "limit_too_small"
        assert refused.json()["error"]["param"] == "max_tokens"
        assert service.engine.submitted == []


async def test_a_refused_request_never_reaches_the_engine_and_is_in_the_ledger(store):
    async with serving(store, alice={"requests_per_minute": 1}) as service:
        for _ in range(4):
            await service.chat(key="alice")
        assert len(service.engine.submitted) == 1
    assert counts(usage(store)["alice"])[3] == 3


@pytest.mark.parametrize(
    "limits", [{"requests_per_minute": 1}, {"input_tokens_per_minute": 40}, {"tokens_per_day": 40}]
)
async def test_whoever_is_over_a_limit_is_told_so_before_a_prompt_is_made(store, monkeypatch, limits):
    made = []
    async with serving(store, alice=limits) as service:
        first = await service.complete([5] * 39, key="alice", max_tokens=1)
        render, encode = service.context.template.render, service.tokenizer.encode
        monkeypatch.setattr(service.context.template, "render", lambda *given: made.append(1) or render(*given))
        monkeypatch.setattr(
            service.tokenizer, "encode", lambda *given, **more: made.append(1) or encode(*given, **more)
        )
        refused = [await service.complete("1" * 30, key="alice"), await service.chat(key="alice", max_tokens=16)]
        large = [{"role": "user", "content": ""}] * 900
        refused.append(await service.post("/v1/chat/completions", key="alice", messages=large))
    assert (first.status_code, [answer.status_code for answer in refused]) == (200, [429] * 3)
    assert made == []
    assert counts(usage(store)["alice"])[3] == 3


async def test_a_large_body_of_whoever_is_over_a_limit_is_not_parsed(tmp_path, store, monkeypatch):
    monkeypatch.setattr("penstock.server.body._LARGE_BODY_BYTES", 1000)
    async with serving(store, alice={"requests_per_minute": 1}) as service:
        wrong = {"key": "alice", "prompt": 7, "user": "x" * 2000}
        assert (await service.post("/v1/completions", **wrong)).status_code == 400
        await service.complete(key="alice")
        assert (await service.post("/v1/completions", **wrong)).status_code == 429


@pytest.mark.parametrize("prompt", ["x" * 5000, [5] * 600, [10**6]])
async def test_a_request_whose_prompt_was_made_in_vain_counts_as_one(store, prompt):
    async with serving(store, alice={"requests_per_minute": 2}) as service:
        answers = [await service.complete(prompt, key="alice") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [400, 400, 429, 429]


async def test_whoever_is_refused_for_a_long_prompt_too_is_told_a_wait_that_is_long_enough(store):
    async with serving(store, alice={"requests_per_minute": 4, "input_tokens_per_minute": 60}) as service:
        for _ in range(4):
            await service.complete([5] * 15, key="alice", max_tokens=1)
        short, long = [await service.complete("x" * size, key="alice", max_tokens=1) for size in (2, 200)]
    assert int(short.headers["retry-after-ms"]) <= 15_000
    assert 15_000 < int(long.headers["retry-after-ms"]) <= 60_000
    assert "input_tokens_per_minute" in long.json()["error"]["message"]


@pytest.mark.parametrize("limit", ["output_tokens_per_minute", "tokens_per_day"])
@pytest.mark.parametrize("certain", [{"min_tokens": 60}, {"ignore_eos": True}, {"min_tokens": 60, "ignore_eos": True}])
async def test_an_answer_that_is_certainly_too_long_for_a_limit_is_400(store, limit, certain):
    async with serving(store, alice={limit: 50}) as service:
        refused = await service.chat(key="alice", **certain)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "limit_too_small")
        may_stop = await service.chat(key="alice", ignore_eos=True, stop="\n")
        assert may_stop.status_code == 200


async def test_the_tokens_that_an_answer_certainly_has_are_reserved(store):
    async with serving(store, alice={"output_tokens_per_minute": 1000}) as service:
        answer = await service.chat(key="alice", min_tokens=400)
    assert answer.headers["x-ratelimit-remaining-output-tokens"] == "600"


async def test_a_callers_own_deadline_is_no_error_of_the_servers(store):
    async with serving(store, alice={"requests_per_minute": 10}) as service:
        service.engine.script = lambda request: [
            TokenEvent(
                request_id=request.request_id,
                finish=FinishReason.ERROR,
                error="too late",
                error_code=DeadlineExceeded.code,
            )
        ]
        assert (await service.chat(key="alice", deadline_ms=500)).status_code == 504
    assert counts(usage(store)["alice"]) == (0, 0, 0, 0, 0)


@contextlib.contextmanager
def locked(store):
    connection = sqlite3.connect(store, isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")
        connection.close()


async def is_all_given_back(service, store):
    """Whether alice has what is left of 500 tokens behind a small request, which the store does after all others."""
    small = (await service.complete(key="alice", max_tokens=1)).json()
    for _ in range(100):
        if await asyncio.to_thread(tokens_left_today, store, "alice", 500) == 500 - small["usage"]["total_tokens"]:
            return True
        await asyncio.sleep(0.02)
    return False


async def test_a_locked_store_is_503_in_bounded_time_and_reserves_nothing_behind_it(store, monkeypatch):
    monkeypatch.setattr(meter, "STORE_SECONDS", 0.05)
    async with serving(store, alice={"requests_per_minute": 2, "tokens_per_day": 500}, bob={}) as service:
        with locked(store):
            answers = await asyncio.gather(*(service.complete(key="alice", max_tokens=400) for _ in range(3)))
            assert [answer.json()["error"]["code"] for answer in answers] == ["store_unavailable"] * 3
            assert (await service.complete(key="bob")).status_code == 200
        monkeypatch.setattr(meter, "STORE_SECONDS", 10.0)
        assert await is_all_given_back(service, store)
        assert len(service.engine.submitted) == 2, "bob's, and the small one"
        await until(lambda: usage(store)["alice"].errors == 3)


@pytest.mark.parametrize("prompt", [[5] * 61, [[5] * 31, [6] * 30], "a " * 4000], ids=["ids", "several", "text"])
async def test_a_prompt_that_can_never_fit_is_400_also_while_its_limit_is_used_up(store, prompt):
    async with serving(store, alice={"input_tokens_per_minute": 60}) as service:
        assert (await service.complete([5] * 60, key="alice")).status_code == 200
        refused = await service.complete(prompt, key="alice")
        fitting = await service.complete([5] * 60, key="alice")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "limit_too_small")
    assert "input_tokens_per_minute, but your key has 60 in all" in refused.json()["error"]["message"]
    assert (fitting.status_code, fitting.json()["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_tenants_take_turns_at_the_store_when_one_of_them_floods_it(store, monkeypatch):
    gate, lined_up, asked = threading.Event(), [], []
    submit_among, look = StoreThread.submit_among, QuotaStore.look

    def line_up(self, tenant, work, question):
        lined_up.append(tenant)
        return submit_among(self, tenant, work, question)

    def held_up(self, glances):
        gate.wait(10)
        asked.append((glances[0].caller.tenant, len(glances)))
        return look(self, glances)

    monkeypatch.setattr(StoreThread, "submit_among", line_up)
    monkeypatch.setattr(QuotaStore, "look", held_up)
    async with serving(store, alice={"requests_per_minute": 10}, bob={"requests_per_minute": 10}) as service:
        flood = [asyncio.create_task(service.chat(key="alice")) for _ in range(20)]
        await until(lambda: lined_up.count("alice") == 20)
        bobs = asyncio.create_task(service.chat(key="bob"))
        await until(lambda: "bob" in lined_up)
        gate.set()
        assert (await bobs).status_code == 200
        await asyncio.gather(*flood)
    assert [tenant for tenant, _ in asked].index("bob") <= 2, "behind what is under way, and those whose turn was next"
    assert len(asked) <= 3, "what a tenant asked meanwhile is looked at together"
    assert sum(count for tenant, count in asked if tenant == "alice") == 20


async def test_a_deadline_ends_the_wait_for_a_locked_store(store):
    async with serving(store, alice={"tokens_per_day": 500}, bob={}) as service:
        with locked(store):
            late = await service.complete(key="alice", max_tokens=400, deadline_ms=150)
            assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
            slow = await service.complete(key="alice", max_tokens=400, targets={"ttft_ms": 150})
            assert (slow.status_code, slow.json()["error"]["code"]) == (429, "overloaded")
        assert await is_all_given_back(service, store)


async def test_nothing_waits_for_the_books_behind_a_deadline(store, monkeypatch):
    monkeypatch.setattr(meter, "_MAX_WAIT_SECONDS", 60.0)
    async with serving(store, bob={}) as service:
        with locked(store):
            assert (await service.complete(key="bob", deadline_ms=1000)).status_code == 200
    assert usage(store)["bob"].requests == 1


async def test_the_longest_context_of_a_key_bounds_prompt_and_answer(store):
    async with serving(store, alice={"longest_context": 40}) as service:
        too_long = await service.complete([5] * 40, key="alice")
        assert too_long.json()["error"]["code"] == "context_length_exceeded"
        together = await service.complete([5] * 20, key="alice", max_tokens=21)
        assert together.json()["error"]["code"] == "context_length_exceeded"
        assert (await service.chat("hi", key="alice")).status_code == 200
        sent = service.engine.submitted[-1]
        assert len(sent.prompt) + sent.params.max_tokens == 40


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_answered_is_in_the_ledger_before_its_last_byte(store, stream):
    seen = []
    async with serving(store, alice={}) as service, listening(service.context) as url:
        body = {"model": "tiny", "prompt": "hi", "stream": stream, "stream_options": {"include_usage": True}}
        if not stream:
            del body["stream_options"]
        headers = {"authorization": "Bearer alice"}
        async with (
            httpx.AsyncClient(base_url=url, headers=headers) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            async for chunk in response.aiter_bytes():
                if b"[DONE]" in chunk or not stream:
                    seen.append(usage(store))
    assert seen[0]["alice"].requests == 1
    assert seen[0]["alice"].output_tokens > 0


async def test_the_truth_replaces_the_reservation(store):
    limit = 10_000
    async with serving(store, alice={"tokens_per_day": limit}) as service:
        answer = (await service.complete("hi", key="alice", max_tokens=400)).json()
    assert answer["usage"]["completion_tokens"] < 400
    assert tokens_left_today(store, "alice", limit) == limit - answer["usage"]["total_tokens"]
    assert usage(store)["alice"].output_tokens == answer["usage"]["completion_tokens"]


async def test_an_aborted_request_pays_its_prompt_and_what_was_made(store):
    limit, never = 10_000, asyncio.Event()
    async with serving(store, alice={"tokens_per_day": limit}) as service:
        service.engine.script = lambda request: [service.engine.event(request, [5, 6, 7]), never]
        async with listening(service.context) as url:
            body = {"model": "tiny", "prompt": [5] * 10, "max_tokens": 100, "stream": True}
            async with (
                httpx.AsyncClient(base_url=url, headers={"authorization": "Bearer alice"}) as client,
                client.stream("POST", "/v1/completions", json=body) as response,
            ):
                await anext(response.aiter_bytes())
            await until(lambda: "alice" in usage(store))
    assert counts(usage(store)["alice"]) == (1, 10, 3, 0, 0)
    assert tokens_left_today(store, "alice", limit) == limit - 13


async def test_a_request_that_the_full_engine_refuses_costs_nothing(store):
    async with serving(store, alice={"requests_per_minute": 1}) as service:
        refusal = TokenEvent(
            request_id="x", finish=FinishReason.ERROR, error_code="overloaded", error="full", retry_after_seconds=1.0
        )
        script = service.engine.script
        service.engine.script = lambda request: [refusal]
        assert (await service.chat(key="alice")).json()["error"]["code"] == "overloaded"
        service.engine.script = script
        assert (await service.chat(key="alice")).status_code == 200
    assert counts(usage(store)["alice"])[0] == 1
    assert usage(store)["alice"].refused == 1


@pytest.mark.parametrize("connected", [True, False])
async def test_a_request_that_fails_frees_its_place_and_is_an_error_in_the_ledger(store, connected):
    async with serving(store, alice={"concurrent_requests": 1}) as service:
        script = service.engine.script
        service.engine.connected = connected
        service.engine.script = lambda request: [EngineFailed("gone")]
        assert (await service.chat(key="alice")).status_code >= 500
        service.engine.connected, service.engine.script = True, script
        assert (await service.chat(key="alice")).status_code == 200
    assert usage(store)["alice"].errors == 1
    assert usage(store)["alice"].requests == 1


async def test_concurrent_requests_are_refused_beyond_their_limit_and_free_their_place(store):
    gate = asyncio.Event()
    async with serving(store, alice={"concurrent_requests": 2}) as service:
        script = service.engine.script
        service.engine.script = lambda request: [gate, *script(request)]
        calls = [asyncio.create_task(service.chat(key="alice")) for _ in range(2)]
        await until(lambda: len(service.engine.submitted) == 2)
        refused = await service.chat(key="alice")
        assert "concurrent_requests = 2" in refused.json()["error"]["message"]
        gate.set()
        assert [(await call).status_code for call in calls] == [200, 200]
        assert (await service.chat(key="alice")).status_code == 200


FRAMED = {"model": "tiny", "prompt": [5] * 10, "max_tokens": 40, "stream": True}


def from_gateway(service, lease=None, model="tiny"):
    """The headers of a request that a gateway on the server's store passes on."""
    authorization = "Bearer alice"
    voucher = sign_voucher(Voucher(model, lease), service.context.tenancy.fleet_secret, authorization)
    return {"authorization": authorization, FRAMES_HEADER: "7", VOUCHER_HEADER: voucher}


async def begin_and_fail(service, headers):
    """Have a stream fail after three tokens; return what is needed to go on with it, and its lease."""
    script = service.engine.script
    service.engine.script = lambda request: [*script(request)[:3], EngineFailed("gone")]
    failed = await service.client.post("/v1/completions", json=FRAMED, headers=headers)
    service.engine.script = script
    reader = FrameReader()
    reader.feed(failed.content)
    assert reader.failure == "engine_failed"
    begun = {"id": "cmpl-1", "created": 5, "token_ids": reader.token_ids}
    return {**FRAMED, "continue_from": begun, "stream_options": {"include_usage": True}}, failed.headers[FRAMES_HEADER]


async def test_a_gateways_stream_that_failed_is_gone_on_with_on_its_lease_and_counted_once(store):
    limits = {"concurrent_requests": 1, "requests_per_minute": 1, "tokens_per_day": 1000}
    async with serving(store, alice=limits) as service:
        body, lease = await begin_and_fail(service, from_gateway(service))
        refused = await service.client.post("/v1/completions", json=FRAMED, headers=from_gateway(service))
        assert refused.status_code == 429
        heir = await service.client.post("/v1/completions", json=body, headers=from_gateway(service, lease))
        assert heir.status_code == 200
    told = events_in(FrameReader().feed(heir.content))[-2]["usage"]
    assert counts(usage(store)["alice"]) == (1, 10, told["completion_tokens"], 1, 0)
    assert tokens_left_today(store, "alice", 1000) == 1000 - told["total_tokens"]


@contextlib.asynccontextmanager
async def given_up(store, body, *, is_vouched=True, is_still=True) -> AsyncIterator[tuple[Service, str]]:
    """A server whose engine gave three tokens of a request, and whose caller has left; yields it and the lease."""
    never = asyncio.Event()
    async with serving(store, alice={"requests_per_minute": 1, "tokens_per_day": 1000}) as service:
        script, headers = service.engine.script, from_gateway(service)
        service.engine.script = lambda request: [service.engine.event(request, [5, 6, 7]), never]
        if not is_vouched:
            del headers[VOUCHER_HEADER]
        lease = ""
        async with listening(service.context) as url, httpx.AsyncClient(base_url=url, headers=headers) as client:
            if body["stream"]:
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    await anext(response.aiter_bytes())
                    lease = response.headers[FRAMES_HEADER]
                    service.engine.pulse_age_seconds = 9.0 if is_still else 0.1
            else:
                call = asyncio.create_task(client.post("/v1/completions", json=body))
                await until(lambda: len(service.engine.submitted) == 1)
                service.engine.pulse_age_seconds = 9.0 if is_still else 0.1
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
            await until(lambda: len(service.context.answers) == 0)
        service.engine.pulse_age_seconds, service.engine.script = 0.0, script
        yield service, lease


async def test_what_a_gateway_took_from_an_engine_that_stood_still_is_gone_on_with_and_counted_once(store):
    async with given_up(store, FRAMED) as (service, lease):
        begun = {"id": "cmpl-1", "created": 5, "token_ids": [[5, 6, 7]]}
        body = {**FRAMED, "continue_from": begun, "stream_options": {"include_usage": True}}
        heir = await service.client.post("/v1/completions", json=body, headers=from_gateway(service, lease))
        assert heir.status_code == 200
    told = events_in(FrameReader().feed(heir.content))[-2]["usage"]
    assert counts(usage(store)["alice"]) == (1, 10, told["completion_tokens"], 0, 0)
    assert tokens_left_today(store, "alice", 1000) == 1000 - told["total_tokens"]


async def test_what_had_sent_nothing_before_its_engine_stood_still_is_asked_elsewhere_and_counted_once(store):
    body = {**FRAMED, "stream": False}
    async with given_up(store, body) as (service, _):
        again = await service.client.post("/v1/completions", json=body, headers=from_gateway(service))
        assert again.status_code == 200  # the one that its minute has
    told = again.json()["usage"]
    assert counts(usage(store)["alice"]) == (1, 10, told["completion_tokens"], 0, 0)


@pytest.mark.parametrize(("is_vouched", "is_still"), [(True, False), (False, True)])
async def test_a_caller_who_leaves_pays_for_what_he_got(store, is_vouched, is_still):
    async with given_up(store, FRAMED, is_vouched=is_vouched, is_still=is_still):
        await until(lambda: "alice" in usage(store))
    assert counts(usage(store)["alice"]) == (1, 10, 3, 0, 0)


async def test_a_caller_without_a_gateway_learns_no_lease_and_moves_none(store):
    limits = {"concurrent_requests": 2, "requests_per_minute": 2, "tokens_per_day": 1000}
    own = {"authorization": "Bearer alice", FRAMES_HEADER: "7"}
    async with serving(store, alice=limits) as service:
        body, lease = await begin_and_fail(service, own)
        assert lease == "none"
        assert (usage(store)["alice"].requests, usage(store)["alice"].errors) == (0, 1)
        _, real = await begin_and_fail(service, from_gateway(service))
        forged = {**own, VOUCHER_HEADER: sign_voucher(Voucher("tiny", real), "guessed", "Bearer alice")}
        for headers in (own, forged):
            assert (await service.client.post("/v1/completions", json=body, headers=headers)).status_code == 429
        begun = {**body["continue_from"], "lease": real}
        refused = await service.client.post("/v1/completions", json={**body, "continue_from": begun}, headers=own)
        assert refused.json()["error"]["param"] == "continue_from.lease"


async def test_however_a_caller_goes_on_with_its_running_stream_it_keeps_its_limits(store):
    gate = asyncio.Event()
    async with serving(store, alice={"concurrent_requests": 1, "requests_per_minute": 2}) as service:
        script = service.engine.script
        service.engine.script = lambda request: [*script(request)[:1], gate, *script(request)[1:]]
        own = {"authorization": "Bearer alice", FRAMES_HEADER: "7"}
        first = asyncio.create_task(service.client.post("/v1/completions", json=FRAMED, headers=own))
        await until(lambda: len(service.engine.submitted) == 1)
        body = {**FRAMED, "continue_from": {"id": "cmpl-1", "created": 5, "token_ids": [[5]]}}
        for _ in range(8):
            refused = await service.client.post("/v1/completions", json=body, headers=own)
            assert "concurrent_requests = 1" in refused.json()["error"]["message"]
        gate.set()
        assert (await first).status_code == 200


async def test_a_key_that_allows_an_alias_opens_the_model_to_a_gateway_that_vouches_for_the_name(store):
    file = Path(store).parent / "keys.toml"
    digest = hashlib.sha256(b"alice").hexdigest()
    file.write_text(f'[[keys]]\nname = "alice"\nsha256 = "{digest}"\nmodels = ["gpt-4o"]\n')
    async with running_service(keys=load_keys(str(file)), keys_file=str(file), store=store) as service:
        body = {**FRAMED, "stream": False}

        async def status(headers):
            return (await service.client.post("/v1/completions", json=body, headers=headers)).status_code

        assert await status(from_gateway(service, model="gpt-4o")) == 200
        assert await status(from_gateway(service, model="another")) == 404
        assert await status({"authorization": "Bearer alice"}) == 404
        forged = sign_voucher(Voucher("gpt-4o"), "guessed", "Bearer alice")
        assert await status({"authorization": "Bearer alice", VOUCHER_HEADER: forged}) == 404


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_two_servers_on_one_store_share_a_limit(tmp_path, request, kind):
    store = str(tmp_path / "penstock.db") if kind == "sqlite" else request.getfixturevalue("empty_postgres_url")
    limits = {"tokens_per_day": 55}
    async with serving(store, tmp_path, alice=limits) as one, serving(store, tmp_path, alice=limits) as two:
        # Ten tokens and one.
        calls = [server.complete([5] * 10, key="alice", max_tokens=1) for _ in range(5) for server in (one, two)]
        statuses = [response.status_code for response in await asyncio.gather(*calls)]
    assert sorted(statuses) == [200] * 5 + [429] * 5


async def test_tenants_without_limits_need_no_store_to_be_served(tmp_path, store):
    async with serving(store, alice={}, bob={"tokens_per_day": MANY}) as service:
        service.context.tenancy.database.close()
        for file in tmp_path.iterdir():
            file.unlink()
        (tmp_path / "penstock.db").mkdir()
        assert (await service.chat(key="alice")).status_code == 200
        refused = await service.chat(key="bob")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
        (tmp_path / "penstock.db").rmdir()
        Database.open(store).close()
        await until(lambda: "alice" in usage(store))
    assert usage(store)["alice"].requests == 1
    assert counts(usage(store)["bob"]) == (0, 0, 0, 0, 1), "an error, as others of the server's own"


async def test_without_a_store_only_tenants_without_limits_are_served(tmp_path):
    async with serving(None, tmp_path, alice={}, bob={"tokens_per_day": MANY}) as service:
        assert (await service.chat(key="alice")).status_code == 200
        assert (await service.chat(key="bob")).json()["error"]["code"] == "store_unavailable"
        assert len(service.engine.submitted) == 1


async def test_openais_client_waits_as_long_as_it_is_told(store):
    # 20 a minute: a new one fits after 3 s.
    async with serving(store, alice={"requests_per_minute": 20}) as service:
        database = service.context.tenancy.database
        need = Need(input_tokens=0, most_output_tokens=0, output_is_stated=True)
        alice = Caller("alice", KeyTerms(limits=Limits(requests_per_minute=20)))
        while isinstance((await asyncio.to_thread(QuotaStore(database).admit, [Ask(alice, need)]))[0], Lease):
            pass
        async with (
            listening(service.context) as url,
            openai.AsyncOpenAI(api_key="alice", base_url=f"{url}/v1", max_retries=2) as client,
        ):
            answer = await client.completions.create(model="tiny", prompt="hi")
            assert answer.choices[0].text
    assert usage(store)["alice"].refused >= 1


async def test_a_gateways_copies_stand_in_nobodys_account(store):
    async with running_service(store=store) as service:
        copied = await service.client.post(
            "/v1/completions", json={"model": "tiny", "prompt": "hi"}, headers={SHADOW_HEADER: "1"}
        )
        assert copied.status_code == 200
    assert set(usage(store)) == {SHADOW_TENANT}
