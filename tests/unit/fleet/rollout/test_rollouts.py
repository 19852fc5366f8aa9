"""Rollouts in a gateway before scripted servers: who answers, what is copied, what is decided."""

import asyncio
import contextlib
import hashlib
import itertools
import re

import msgspec
import pytest
from aiohttp import web

from penstock.errors import ConfigError
from penstock.fleet.config import ReplicaEntry
from penstock.fleet.fleet_file import read_fleet
from penstock.fleet.rollout.book import RolloutMemory
from penstock.fleet.rollout.plan import GateSection, RolloutSection
from penstock.protocol.frames import FRAMES_HEADER, ChoiceTokens, frame, last_frame
from penstock.store.database import Database
from penstock.store.key_ring import KeyRing
from penstock.store.rollouts import RolloutStore
from penstock.tenants import SHADOW_HEADER, ApiKey, KeyTerms
from tests.fakes.fake_replica import FakeReplica
from tests.unit.fleet.conftest import QUICK, running_gateway

# Times of scripted servers are noise; everything else is judged.
GATE = GateSection(
    max_ttft_ratio=1e5, max_time_per_token_ratio=1e5, max_error_increase=0.5, max_divergence=0.25, min_step_seconds=0.0,
    window_seconds=1e-4,
)  # fmt: skip
SECTION = RolloutSection(steps=("shadow", 50.0, 100.0), shadow_percent=100.0, max_shadows=64, gate=GATE)


def config(section=SECTION):
    return msgspec.structs.replace(QUICK, rollouts={"tiny": section})


def says(*tokens):
    """Answer in frames, a token each, or at once."""

    async def answer(replica, request, body):
        text = " ".join(map(str, tokens))
        if not body.get("stream"):
            choices = [{"index": 0, "text": text}]
            return web.json_response({"choices": choices, "usage": {"completion_tokens": len(tokens)}})
        response = web.StreamResponse(headers={"content-type": "text/event-stream", FRAMES_HEADER: "1"})
        await response.prepare(request)
        for token in tokens:
            event = msgspec.json.encode({"id": "x", "created": 1, "choices": [{"index": 0, "text": str(token)}]})
            await response.write(frame(b"data: %b\n\n" % event, ChoiceTokens(0, [token])))
        await response.write(last_frame(b"data: [DONE]\n\n"))
        return response

    return answer


def scores(logprob, *tokens):
    """Answer with log-probabilities where they are asked for: in frames, a token each, or at once."""

    def choice(body, *said):
        text = {"index": 0, "text": "".join(said)}
        if body.get("logprobs") is None:
            return text
        tops = [{token: logprob, "other": -9.0} for token in said]
        told = {"tokens": list(said), "token_logprobs": [logprob] * len(said), "top_logprobs": tops}
        return {**text, "logprobs": {**told, "text_offset": [0] * len(said)}}

    async def answer(replica, request, body):
        if not body.get("stream"):
            return web.json_response({"choices": [choice(body, *tokens)], "usage": {"completion_tokens": len(tokens)}})
        response = web.StreamResponse(headers={"content-type": "text/event-stream", FRAMES_HEADER: "1"})
        await response.prepare(request)
        for number, token in enumerate(tokens):
            event = msgspec.json.encode({"id": "x", "created": 1, "choices": [choice(body, token)]})
            await response.write(frame(b"data: %b\n\n" % event, ChoiceTokens(0, [number])))
        await response.write(last_frame(b"data: [DONE]\n\n"))
        return response

    return answer


async def fail(replica, request, body):
    return web.json_response({"error": {"message": "no", "code": "engine_failed"}}, status=500)


async def hang(replica, request, body):
    await asyncio.sleep(60)
    return web.Response()


@contextlib.asynccontextmanager
async def two_versions(stable=None, candidate=None, *, section=SECTION, book=None, ring=None):
    async with (
        FakeReplica(answer=stable or says(1, 2, 3, 4, 5)).running() as one,
        FakeReplica(answer=candidate or says(1, 2, 3, 4, 5), version="b").running() as other,
        running_gateway(one, other, config=config(section), book=book, ring=ring) as running,
    ):
        yield running, one, other


async def ask_many(running, count, **fields):
    """Ask in as many sessions; return the answers' statuses."""
    answers = []
    for begin in range(0, count, 8):
        asked = [running.ask(user=f"user {number}", **fields) for number in range(begin, min(count, begin + 8))]
        answers += await asyncio.gather(*asked)
    return [answer.status for answer in answers]


def told_copies(running):
    """What the gateway's metrics tell of copies, by outcome."""
    exposition, _ = running.gateway.context.metrics.exposition("")
    return re.findall(rb"^penstock_gateway_shadow_requests_total.*", exposition, re.MULTILINE)


async def settled(running):
    """Wait until nothing more becomes of copies: all run in this loop, so that what is under way goes on meanwhile."""
    told, num_equal = told_copies(running), 0
    while num_equal < 5:
        await asyncio.sleep(0.01)
        before, told = told, told_copies(running)
        num_equal = num_equal + 1 if told == before else 0


async def until(condition):
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition never came true")


async def judged(running, rounds=40, count=32, **fields):
    """Send requests until a decision is made; return the rollout."""
    controller, split = running.gateway.rollouts.controller, running.gateway.rollouts.split
    for _ in range(rounds):
        assert set(await ask_many(running, count, stream=True, **fields)) == {200}
        await settled(running)
        await controller.look()
        rollout = split.rollout_of("tiny")
        if not rollout.is_running:
            return rollout
    raise AssertionError(f"nothing was decided: {rollout}")


async def test_a_labelled_replica_gets_nothing_before_something_says_so():
    async with two_versions() as (running, one, other):
        await ask_many(running, 10)
        assert (len(one.received), len(other.received)) == (10, 0)


async def test_a_caller_may_name_a_version_and_the_response_says_who_answered():
    async with two_versions() as (running, _, other):
        answer = await running.ask(headers={"x-penstock-version": "b"})
        assert f"replica={other.name}; version=b;" in answer.headers["x-penstock-route"]
        unknown = await running.ask(headers={"x-penstock-version": "nobody"})
        assert unknown.status == 200 and "version=" not in unknown.headers["x-penstock-route"]


async def test_a_share_of_the_sessions_goes_to_a_version_and_each_stays():
    section = RolloutSection(split={"b": 50.0})
    async with two_versions(section=section) as (running, one, other):
        await ask_many(running, 40)
        assert min(len(one.received), len(other.received)) > 5
        users = {body["user"] for body in other.received}
        await ask_many(running, 40)
        assert {body["user"] for body in other.received} == users


@pytest.mark.parametrize("failure", [fail, None])
async def test_what_the_canary_cannot_answer_the_stable_version_does(failure):
    async with two_versions(candidate=failure, section=RolloutSection(split={"b": 100.0})) as (running, _, other):
        if failure is None:
            other.ready = 503
            await until(lambda: not running.gateway.pool.find(other.url).is_usable)
        assert set(await ask_many(running, 8)) == {200}


async def test_where_only_other_versions_are_up_the_answer_says_so():
    async with FakeReplica(version="b").running() as other, running_gateway(other) as running:
        answer = await running.ask()
        assert answer.status == 503
        assert "'stable'" in (await answer.json())["error"]["message"]


async def test_a_replica_that_registers_again_with_another_version_has_it():
    async with FakeReplica().running() as one, FakeReplica().running() as other, running_gateway(one) as running:
        for version, share in (("b", 0), ("stable", 5)):
            running.gateway.registration.register(ReplicaEntry(url=other.url, version=version))
            await until(lambda: running.gateway.pool.find(other.url).is_usable)
            await ask_many(running, 10)
            assert len(other.received) == share


async def test_a_listed_candidate_that_registers_itself_stays_one():
    async with two_versions() as (running, _, other):
        running.gateway.registration.register(ReplicaEntry(url=other.url))
        await ask_many(running, 10)
        assert not other.received


async def test_copies_reach_the_candidate_marked_and_without_the_callers_key():
    key = ApiKey("alice", hashlib.sha256(b"sk-alice").hexdigest(), KeyTerms(admin=True))
    async with two_versions(ring=KeyRing((key,))) as (running, one, other):
        await running.gateway.rollouts.controller.start("tiny", "b")
        caller = {"authorization": "Bearer sk-alice", "cookie": "secret"}
        assert (await running.ask(headers=caller, stream=True)).status == 200
        await settled(running)
        assert other.received == one.received
        (headers,) = other.headers
        assert headers[SHADOW_HEADER] == "1"
        assert not {"authorization", "cookie"} & set(headers)
        assert headers[FRAMES_HEADER] == one.headers[0][FRAMES_HEADER]  # one seed, so that draws can be compared


@pytest.mark.parametrize("candidate", [fail, hang])
async def test_a_candidate_that_fails_or_hangs_is_nothing_to_the_caller(candidate):
    async with two_versions(candidate=candidate) as (running, _, other):
        await running.gateway.rollouts.controller.start("tiny", "b")
        assert await ask_many(running, 12, stream=True) == [200] * 12
        await until(lambda: len(other.received) == 12)
        replica = running.gateway.pool.find(other.url)
        assert (replica.num_in_flight, replica.breaker.num_ejections) == (0, 0)


async def lost_copies(running):
    """What all gateways are told of copies that told nothing."""
    controller = running.gateway.rollouts.controller
    await controller.look()
    return (await controller.evidence_of(running.gateway.rollouts.split.rollout_of("tiny"))).lost_copies


async def test_copies_are_bounded():
    section = msgspec.structs.replace(SECTION, max_shadows=3)
    async with two_versions(candidate=hang, section=section) as (running, _, other):
        await running.gateway.rollouts.controller.start("tiny", "b")
        await ask_many(running, 10)
        await until(lambda: len(other.received) == 3)
        text = await (await running.client.get(f"{running.url}/metrics")).text()
        assert re.search(r'shadow_requests_total\{outcome="dropped"\} 7', text)
        assert await lost_copies(running) == {"crowd": 7}
        assert len(other.received) == 3


async def test_what_may_have_effects_is_not_copied():
    async with two_versions() as (running, one, other):
        await running.gateway.rollouts.controller.start("tiny", "b")
        body = {"model": "tiny", "input_file_id": "file-1"}
        assert (await running.client.post(f"{running.url}/v1/batches", json=body)).status == 200
        await settled(running)
        assert (len(one.received), len(other.received)) == (1, 0)


async def test_a_candidate_that_does_not_take_the_gateways_key_is_named_once_and_not_blamed(caplog):
    async def refuse(replica, request, body):
        return web.json_response({"error": {"message": "no", "code": "invalid_api_key"}}, status=401)

    async with two_versions(candidate=refuse) as (running, _, other):
        rollouts = running.gateway.rollouts
        await rollouts.controller.start("tiny", "b")
        await ask_many(running, 4)
        await settled(running)
        assert len(other.received) == 4
        assert rollouts.trials.evidence_of(rollouts.split.rollout_of("tiny")).candidate.requests == 0
        assert await lost_copies(running) == {"key": 4}
        assert [record.message for record in caplog.records if "key_file" in record.message] == [
            "a replica takes no copies: its key_file must hold a key with admin = true"
        ]


async def test_a_gateway_says_what_it_serves_until_it_stops(tmp_path):
    database = Database.open(str(tmp_path / "penstock.db"))
    book = RolloutStore(database)
    async with two_versions(book=book) as (running, _, other):
        assert [msgspec.json.decode(text) for text in book.announced(60.0)] == [{"tiny": ["b", "stable"]}]
        running.gateway.pool.remove("static", other.url, "gone")
        await running.gateway.rollouts.controller.look()
        assert [msgspec.json.decode(text) for text in book.announced(60.0)] == [{"tiny": ["stable"]}]
    assert book.announced(60.0) == []
    database.close()


async def test_what_was_seen_is_left_to_the_other_gateways(tmp_path):
    database = Database.open(str(tmp_path / "penstock.db"))
    book = RolloutStore(database)
    async with two_versions(book=book) as (running, _, _other):
        await running.gateway.rollouts.controller.start("tiny", "b")
        await ask_many(running, 5)
        await settled(running)
    assert [msgspec.json.decode(text)["candidate"]["requests"] for text in book.evidence("tiny", 0)] == [5]
    database.close()


async def test_only_the_stated_share_is_copied():
    section = msgspec.structs.replace(SECTION, shadow_percent=25.0)
    async with two_versions(section=section) as (running, _, other):
        await running.gateway.rollouts.controller.start("tiny", "b")
        await ask_many(running, 80)
        await settled(running)
        assert 8 <= len(other.received) <= 32


async def test_a_healthy_candidate_is_promoted_and_then_answers_everything():
    async with two_versions() as (running, one, _other):
        await running.gateway.rollouts.controller.start("tiny", "b")
        rollout = await judged(running)
        assert rollout.status == "promoted", rollout
        one.received.clear()
        await ask_many(running, 10)
        assert one.received == []
        text = await (await running.client.get(f"{running.url}/metrics")).text()
        assert 'rollout_percent{candidate="b",model="tiny",status="promoted"} 100' in text


@pytest.mark.parametrize(("candidate", "reason"), [(says(1, 2, 9, 9, 9), "tokens that differ"), (fail, "error rate")])
async def test_a_broken_candidate_is_rolled_back_and_no_caller_ever_sees_it(candidate, reason):
    async with two_versions(candidate=candidate) as (running, _, other):
        await running.gateway.rollouts.controller.start("tiny", "b")
        rollout = await judged(running)
        assert rollout.status == "rolled_back"
        assert reason in rollout.reason
        assert all(SHADOW_HEADER in headers for headers in other.headers)
        await settled(running)
        other.received.clear()
        await ask_many(running, 10)
        assert other.received == []


async def test_errors_of_the_canary_are_held_against_it_though_no_caller_sees_them():
    section = msgspec.structs.replace(SECTION, steps=(50.0, 100.0))
    async with two_versions(candidate=fail, section=section) as (running, _, _other):
        await running.gateway.rollouts.controller.start("tiny", "b")
        rollouts = running.gateway.rollouts
        evidence = rollouts.trials.evidence_of(rollouts.split.rollout_of("tiny"))
        assert set(await ask_many(running, 40)) == {200}
        await settled(running)
        assert evidence.candidate.errors == evidence.candidate.requests > 0
        assert evidence.stable.errors == 0


@pytest.mark.parametrize(("temperature", "is_compared"), [(0, True), (1, False)])
async def test_whole_answers_are_compared_only_where_they_are_greedy(temperature, is_compared):
    async with two_versions() as (running, _, _other):
        await running.gateway.rollouts.controller.start("tiny", "b")
        await ask_many(running, 8, temperature=temperature)
        await settled(running)
        rollouts = running.gateway.rollouts
        evidence = rollouts.trials.evidence_of(rollouts.split.rollout_of("tiny"))
        assert evidence.candidate.requests == 8
        assert evidence.compared_answers == (8 if is_compared else 0)


WORDS = ("a", "b", "c", "d", "e")


@pytest.mark.parametrize(("logprob", "status"), [(-1.02, "promoted"), (-2.5, "rolled_back")])
async def test_scores_of_the_same_tokens_tell_a_perturbed_model_from_a_corrupted_one(logprob, status):
    async with two_versions(scores(-1.0, *WORDS), scores(logprob, *WORDS)) as (running, _, _other):
        await running.gateway.rollouts.controller.start("tiny", "b")
        rollout = await judged(running, logprobs=0)
        assert rollout.status == status, rollout
        (finding,) = (item for item in rollout.history[0].findings if item.measure.startswith("log-"))
        assert finding.candidate == pytest.approx(abs(logprob + 1.0), rel=0.02)


def fails_every_other_time():
    """Answer well and badly in turns."""
    turns = itertools.cycle((fail, says(1, 2, 3, 4, 5)))

    async def answer(replica, request, body):
        return await next(turns)(replica, request, body)

    return answer


async def test_what_fails_of_both_versions_counts_against_neither():
    async with two_versions(fails_every_other_time(), fails_every_other_time()) as (running, _, _):
        await running.gateway.rollouts.controller.start("tiny", "b")
        for number in range(8):
            await running.ask(user=f"user {number}")
        await settled(running)
        rollouts = running.gateway.rollouts
        evidence = rollouts.trials.evidence_of(rollouts.split.rollout_of("tiny"))
        assert (evidence.stable.requests, evidence.stable.errors) == (16, 8)  # each was tried again
        assert (evidence.candidate.requests, evidence.candidate.errors) == (8, 4)


@pytest.mark.parametrize("streams", [True, False])
async def test_scores_are_asked_of_both_versions_where_callers_do_not_and_the_operator_wants_them(streams):
    gate = msgspec.structs.replace(GATE, asks_logprobs=True)
    section = msgspec.structs.replace(SECTION, gate=gate)
    replicas = scores(-1.0, *WORDS), scores(-1.5, *WORDS)
    async with two_versions(*replicas, section=section) as (running, one, other):
        await running.gateway.rollouts.controller.start("tiny", "b")
        await ask_many(running, 4, stream=streams, max_tokens=500, temperature=1)
        await settled(running)
        rollouts = running.gateway.rollouts
        evidence = rollouts.trials.evidence_of(rollouts.split.rollout_of("tiny"))
        assert (evidence.candidate.requests, evidence.logprob_distance.num_values) == (4, 4)
        assert evidence.logprob_distance.quantile(0.5) == pytest.approx(0.5, rel=0.02)
        asked = [body for body in one.received if "logprobs" in body]
        also_asked = [body for body in other.received if "logprobs" in body]
        assert sorted(asked, key=str) == sorted(also_asked, key=str)
        assert {(body["max_tokens"], body["temperature"], body["stream"]) for body in asked} == {(64, 0, False)}
        assert sum(SHADOW_HEADER.lower() in headers for headers in one.headers) == 4  # nobody is charged for them


async def test_requests_that_name_a_version_are_not_compared():
    section = msgspec.structs.replace(SECTION, steps=(50.0, 100.0))
    async with two_versions(section=section) as (running, _, _other):
        await running.gateway.rollouts.controller.start("tiny", "b")
        for _ in range(4):
            await running.ask(headers={"x-penstock-version": "b"})
        rollouts = running.gateway.rollouts
        evidence = rollouts.trials.evidence_of(rollouts.split.rollout_of("tiny"))
        assert (evidence.stable.requests, evidence.candidate.requests) == (0, 0)


async def test_two_gateways_on_a_store_add_up_what_they_saw_and_agree(tmp_path):
    database = Database.open(str(tmp_path / "penstock.db"))
    async with (
        two_versions(candidate=says(7), book=RolloutStore(database)) as (first, _, _a),
        two_versions(candidate=says(7), book=RolloutStore(database)) as (second, _, _b),
    ):
        one, two = first.gateway.rollouts, second.gateway.rollouts
        await one.controller.start("tiny", "b")
        await two.controller.look()
        assert two.split.rollout_of("tiny").is_shadowing
        await ask_many(first, 12, stream=True)
        await settled(first)
        await one.controller.look()
        assert one.split.rollout_of("tiny").is_running  # 12 pairs are fewer than the first look needs
        await ask_many(second, 12, stream=True)
        await settled(second)
        await two.controller.look()  # and 24 are enough
        await one.controller.look()
        assert one.split.rollout_of("tiny") == two.split.rollout_of("tiny")
        assert one.split.rollout_of("tiny").status == "rolled_back"
    database.close()


async def test_a_gateway_that_starts_again_knows_what_was_decided(tmp_path):
    database = Database.open(str(tmp_path / "penstock.db"))
    async with two_versions(book=RolloutStore(database)) as (running, _, _other):
        await running.gateway.rollouts.controller.start("tiny", "b")
        before = await judged(running)
    async with two_versions(book=RolloutStore(database)) as (running, one, other):
        assert running.gateway.rollouts.split.rollout_of("tiny") == before
        await ask_many(running, 10)
        assert (len(one.received), len(other.received)) == (0, 10)
    database.close()


async def test_a_store_that_fails_leaves_rollouts_as_they_were(tmp_path):
    database = Database.open(str(tmp_path / "penstock.db"))
    async with two_versions(book=RolloutStore(database)) as (running, _, _other):
        await running.gateway.rollouts.controller.start("tiny", "b")
        with database.writing() as connection:
            connection.exec_driver_sql("DROP TABLE penstock_rollouts")
        await running.gateway.rollouts.controller.look()
        assert running.gateway.rollouts.split.rollout_of("tiny").is_shadowing
        assert (await running.ask()).status == 200
    database.close()


async def test_a_rollout_of_another_penstock_is_left_alone():
    book = RolloutMemory()
    async with two_versions(book=book) as (running, _, _other):
        book.change("tiny", 0, lambda document, evidence, now: '{"model": "tiny", "gate": {"new": 1}}')
        await running.gateway.rollouts.controller.look()
        assert running.gateway.rollouts.split.rollouts == []
        assert (await running.ask()).status == 200


@pytest.fixture
async def admin():
    key = ApiKey("root", hashlib.sha256(b"root").hexdigest(), KeyTerms(admin=True))
    async with two_versions(ring=KeyRing((key,)), book=RolloutMemory()) as (running, _, _other):
        running.client.headers["authorization"] = "Bearer root"
        yield running


async def test_a_rollout_is_begun_shown_and_aborted_over_http(admin):
    url = f"{admin.url}/admin/rollout"
    wrong = await admin.client.post(url, json={"model": "tiny", "candidate": "c"})
    assert wrong.status == 400 and "there are: b, stable" in (await wrong.json())["error"]["message"]
    wrong = await admin.client.post(url, json={"model": "tinny", "candidate": "b"})
    assert wrong.status == 404 and "served: tiny" in (await wrong.json())["error"]["message"]
    begun = await admin.client.post(url, json={"model": "tiny", "candidate": "b"})
    assert (begun.status, (await begun.json())["status"]) == (200, "running")
    (shown,) = (await (await admin.client.get(url)).json())["rollouts"]
    assert (shown["rollout"]["candidate"], shown["evidence"]["candidate"]["requests"]) == ("b", 0)
    page = await (await admin.client.get(f"{url}.md")).text()
    assert page.startswith("# Rollout of tiny: stable → b\n\n**running**")
    ended = await admin.client.delete(url, params={"model": "tiny"})
    assert (await ended.json())["status"] == "aborted"
    again = await admin.client.delete(url, params={"model": "tiny"})
    assert again.status == 400


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("steps = ['shadow', 5, 50]", "end with 100"),
        ("steps = [50, 5, 100]", "rising"),
        ("steps = [5, 'shadow', 100]", "may come first"),
        ("split = { b = 60, c = 50 }", "at most 100"),
        ("shadow_percent = 0", "over 0"),
        ("max_shadows = 0", "at least 1"),
        ("gate = { error_level = 1.5 }", "between 0 and 1"),
        ("gate = { max_ttft_ratio = 0.9 }", "over 1"),
        ("gate = { window_seconds = 0 }", "seconds, over 0"),
        ("gate = { max_logprob_distance = 0 }", "in nats"),
        ("gate = { asks_logprobs = true, compares_outputs = false }", "needs compares_outputs"),
        ("gate = { first_look = 0 }", "at least 1"),
        ("gate = { min_step_seconds = 9, max_step_seconds = 1 }", "min_step_seconds"),
        ("gates = {}", "gates"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path, text, says):
    file = tmp_path / "fleet.toml"
    file.write_text(f"[rollouts.tiny]\n{text}\n")
    with pytest.raises(ConfigError, match=re.escape(says)):
        read_fleet(file)


def test_a_version_of_odd_characters_is_refused(tmp_path):
    file = tmp_path / "fleet.toml"
    file.write_text("replicas = [{url = 'http://a', version = 'b;c'}]\n")
    with pytest.raises(ConfigError, match="letters"):
        read_fleet(file)
