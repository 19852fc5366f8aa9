"""How urgent a request is to the gateway: by its own word, else by its key's."""

import msgspec
import pytest

from penstock.fleet.router.query import read_head
from penstock.fleet.router.urgency import PLAIN, Urgency, urgency_of, with_time_left
from penstock.request import Targets
from penstock.tenants import KeyTerms

ARRIVAL = 100.0


def urgency(body, **targets):
    return urgency_of(
        read_head(msgspec.json.encode({"model": "tiny", **body})), KeyTerms(targets=Targets(**targets)), ARRIVAL
    )


@pytest.mark.parametrize(
    ("body", "targets", "expected"),
    [
        ({}, {}, PLAIN),
        ({"deadline_ms": 1500}, {"deadline_seconds": 1.0}, Urgency(deadline=101.5)),
        ({}, {"deadline_seconds": 2.0}, Urgency(deadline=102.0, is_keys_deadline=True)),
        ({"targets": {"ttft_ms": 700}}, {"ttft_seconds": 0.5}, Urgency(first_token_by=100.7)),
        ({"targets": {}}, {"ttft_seconds": 0.5}, Urgency(first_token_by=100.5, is_keys_ttft=True)),
    ],
)
def test_a_request_is_heard_before_its_key(body, targets, expected):
    assert urgency(body, **targets) == expected


def test_the_best_effort_that_a_caller_asks_for_leaves_its_keys_deadline():
    wanted = urgency({"best_effort": True}, ttft_seconds=0.5, deadline_seconds=2.0)
    assert (wanted.deadline, wanted.first_token_by) == (102.0, None)


@pytest.mark.parametrize(
    "body",
    [{"deadline_ms": value} for value in ("abc", -5, 0, True, [1], {}, 1e13)]
    + [{"targets": value} for value in ("abc", "", [], -5, True, {"ttft_ms": -1}, {"ttft_ms": "x"})],
)
def test_what_makes_no_sense_goes_to_the_replica_as_it_is(body):
    key = {"ttft_seconds": 0.5} if "targets" in body else {"deadline_seconds": 2.0}
    sent = msgspec.json.encode({"model": "tiny", **body})
    assert urgency(body, **key) == PLAIN
    assert with_time_left(sent, urgency(body, **key), ARRIVAL + 0.5, has_begun=False) == sent


def test_a_key_may_state_more_time_than_a_request():
    told = with_time_left(b'{"model": "tiny"}', urgency({}, deadline_seconds=1e9), ARRIVAL + 0.5, has_begun=False)
    assert msgspec.json.decode(told)["deadline_ms"] == 604_800_000


def test_what_a_replica_knows_of_the_key_is_left_to_it():
    body = b'{"model": "tiny"}'
    wanted = urgency({}, deadline_seconds=2.0, ttft_seconds=1.0)
    assert with_time_left(body, wanted, ARRIVAL, has_begun=False, leaves_keys=True) == body
    own = urgency({"deadline_ms": 1500}, ttft_seconds=1.0)
    told = with_time_left(body, own, ARRIVAL + 0.5, has_begun=False, leaves_keys=True)
    assert msgspec.json.decode(told) == {"model": "tiny", "deadline_ms": 1000.0}


def test_a_replica_is_told_what_is_left_of_a_keys_deadline():
    body = msgspec.json.encode({"model": "tiny"})
    told = with_time_left(body, urgency({}, deadline_seconds=2.0), ARRIVAL + 0.5, has_begun=True)
    assert msgspec.json.decode(told) == {"model": "tiny", "deadline_ms": 1500.0}
