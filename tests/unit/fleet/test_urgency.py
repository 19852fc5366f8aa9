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
        ({}, {"deadline_seconds": 2.0}, Urgency(deadline=102.0)),
        ({}, {"ttft_seconds": 0.5, "deadline_seconds": 2.0}, Urgency(deadline=102.0, first_token_by=100.5)),
        ({"best_effort": True}, {"ttft_seconds": 0.5, "deadline_seconds": 2.0}, Urgency(deadline=102.0)),
    ],
)
def test_a_request_is_heard_before_its_key(body, targets, expected):
    assert urgency(body, **targets) == expected


def test_a_replica_is_told_what_is_left_of_a_keys_deadline():
    body = msgspec.json.encode({"model": "tiny"})
    told = with_time_left(body, urgency({}, deadline_seconds=2.0), ARRIVAL + 0.5, has_begun=True)
    assert msgspec.json.decode(told) == {"model": "tiny", "deadline_ms": 1500.0}
