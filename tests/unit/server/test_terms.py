"""How soon and before whom: the request's word over its key's, and that over the server's."""

import json

import pytest

from penstock.engine.messages import TokenEvent
from penstock.errors import InvalidParameter
from penstock.protocol.openai_completions import CompletionRequest
from penstock.protocol.wire import parse_request
from penstock.request import NO_TARGETS, FinishReason, TargetOrigin, TargetOrigins, Targets, Tier
from penstock.server.terms import Terms, agree
from penstock.tenants import KeyTerms
from tests.unit.server.conftest import running_service


def wanted(**fields):
    body = {"model": "tiny", "prompt": "hi", **fields}
    return parse_request(CompletionRequest, json.dumps(body).encode())


def test_the_request_is_heard_before_its_key_and_that_before_the_server():
    server, key = Targets(1.0, 0.05), KeyTerms(weight=2.0, priority=3, targets=Targets(0.5, None))
    assert agree(wanted(), KeyTerms(), server).targets == Targets(1.0, 0.05)
    origins = TargetOrigins(TargetOrigin.KEY, TargetOrigin.SERVER)
    assert agree(wanted(), key, server) == Terms(
        weight=2.0, priority=3, targets=Targets(0.5, 0.05), target_origins=origins
    )
    asked = wanted(targets={"ttft_ms": 200, "time_per_token_ms": 20}, priority=-1, deadline_ms=1500, best_effort=True)
    assert agree(asked, key, server) == Terms(
        weight=2.0, priority=-1, targets=Targets(0.2, 0.02), deadline_seconds=1.5, best_effort=True, tier=Tier.ONLINE
    )


@pytest.mark.parametrize(
    ("asked", "key", "server", "seconds", "origin"),
    [
        (1500, 2.0, 3.0, 1.5, TargetOrigin.REQUEST),
        (2500, 2.0, 3.0, 2.5, TargetOrigin.REQUEST),
        (None, 2.0, 3.0, 2.0, TargetOrigin.KEY),
        (None, None, 3.0, 3.0, TargetOrigin.SERVER),
        (None, None, None, None, TargetOrigin.REQUEST),
    ],
)
def test_a_deadline_is_the_requests_its_keys_or_the_servers(asked, key, server, seconds, origin):
    fields = {} if asked is None else {"deadline_ms": asked}
    terms = agree(wanted(**fields), KeyTerms(targets=Targets(deadline_seconds=key)), Targets(deadline_seconds=server))
    assert terms.deadline_seconds == seconds
    assert terms.target_origins.deadline is origin
    assert terms.targets == NO_TARGETS  # which are the engine's


def test_nobody_asks_for_more_than_its_key_allows():
    with pytest.raises(InvalidParameter, match="priority: 4 is not usable; give an integer from -10 to 3"):
        agree(wanted(priority=4), KeyTerms(priority=3), NO_TARGETS)
    assert agree(wanted(priority=10), KeyTerms(), NO_TARGETS).priority == 10


@pytest.mark.parametrize(
    ("key", "server", "asked_ms", "right"),
    [
        (Targets(), None, 1000, "this key was granted none"),
        (Targets(time_per_token_seconds=0.03), None, 29.9, "the least that this key may ask for is 30"),
        (Targets(time_per_token_seconds=0.03), 0.01, 29.9, "the least that this key may ask for is 30"),
        (Targets(), 0.05, 40, "the least that this key may ask for is 50"),
    ],
)
def test_no_key_asks_for_a_time_per_token_that_nobody_granted_it(key, server, asked_ms, right):
    terms, targets = KeyTerms(priority=0, targets=key), Targets(time_per_token_seconds=server)
    asked = {"time_per_token_ms": asked_ms}
    with pytest.raises(InvalidParameter, match=right) as refused:
        agree(wanted(targets=asked), terms, targets)
    assert refused.value.param == "targets.time_per_token_ms"
    late = agree(wanted(targets=asked, best_effort=True), terms, targets)
    assert late.best_effort and late.targets.time_per_token_seconds == asked_ms / 1000


@pytest.mark.parametrize("asked_ms", [25.3, 40])
def test_a_key_asks_for_the_time_per_token_that_it_was_granted_or_a_longer_one(asked_ms):
    terms = KeyTerms(priority=0, targets=Targets(time_per_token_seconds=0.0253))
    agreed = agree(wanted(targets={"time_per_token_ms": asked_ms}), terms, NO_TARGETS)
    assert agreed.targets == Targets(None, asked_ms / 1000)


def test_a_server_without_keys_grants_any_time_per_token():
    agreed = agree(wanted(targets={"time_per_token_ms": 1}), KeyTerms(), Targets(None, 0.05))
    assert agreed.targets == Targets(None, 0.001)


def test_an_answer_that_goes_on_here_has_had_its_first_token():
    moved = {"id": "cmpl-1", "created": 1, "token_ids": [[5]]}
    terms = KeyTerms(priority=0, targets=Targets(0.5, 0.03))
    agreed = agree(wanted(stream=True, continue_from=moved), terms, Targets(0.2, None))
    assert (agreed.targets, agreed.best_effort, agreed.has_moved) == (Targets(None, 0.03), False, True)
    # A server that grants less than the one which promised does not end the stream for that.
    asked = wanted(stream=True, continue_from=moved, targets={"time_per_token_ms": 20})
    assert agree(asked, terms, NO_TARGETS).targets == NO_TARGETS


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"priority": 11}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"targets": 5}, "targets"),
        ({"targets": {"ttft": 5}}, "targets.ttft"),
        ({"targets": {"ttft_ms": 0}}, "targets.ttft_ms"),
        ({"targets": {"time_per_token_ms": -1}}, "targets.time_per_token_ms"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"deadline_ms": 1e300}, "deadline_ms"),
        ({"best_effort": "yes"}, "best_effort"),
    ],
)
async def test_terms_that_make_no_sense_are_refused_by_name(service, fields, param):
    response = await service.complete(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_terms_reach_the_engine(service):
    await service.chat(targets={"ttft_ms": 250}, priority=2, deadline_ms=60_000, best_effort=True)
    terms = service.engine.submitted[0].terms
    assert (terms.priority, terms.targets, terms.best_effort) == (2, Targets(0.25, None), True)
    assert terms.deadline_seconds == 60.0


async def test_the_servers_targets_hold_where_a_request_names_none():
    async with running_service(targets=Targets(0.5, 0.03)) as service:
        await service.complete(targets={"ttft_ms": 100})
        assert service.engine.submitted[0].terms.targets == Targets(0.1, 0.03)


def refusal(code, **fields):
    return lambda request: [
        TokenEvent(request_id=request.request_id, finish=FinishReason.ERROR, error_code=code, error="no", **fields)
    ]


async def test_what_cannot_be_met_is_429_with_the_time_to_come_back(service):
    service.engine.script = refusal("overloaded", retry_after_seconds=2.345)
    response = await service.complete(targets={"ttft_ms": 100})
    assert response.status_code == 429
    assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("3", "2345")


async def test_a_target_that_nobody_could_meet_is_422(service):
    service.engine.script = refusal("target_unreachable", error_param="deadline_ms")
    response = await service.complete(deadline_ms=1)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (422, "target_unreachable", "deadline_ms")


async def test_a_deadline_is_504_or_a_streams_last_event(service):
    service.engine.script = refusal("deadline_exceeded")
    response = await service.complete(deadline_ms=5)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")

    def late(request):
        spoken = service.engine.say(request, "Hello there", chunk=1)[:3]
        return spoken + refusal("deadline_exceeded")(request)

    service.engine.script = late
    response = await service.complete(deadline_ms=5, stream=True)
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert json.loads(events[-1])["error"]["code"] == "deadline_exceeded"
    assert json.loads(events[0])["choices"][0]["text"]
