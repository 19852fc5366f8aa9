"""What the gateway's log tells of replicas: who comes and goes, ejections, moved streams, keys that are missing."""

import logging
import ssl

import aiohttp
import msgspec
import pytest
from aiohttp import web

from penstock.fleet.config import HealthSection, ReplicaEntry
from penstock.fleet.discovery.registration import Registration
from penstock.fleet.replica import ReplicaPool
from penstock.fleet.router.replica_client import ReplicaUnreachable
from penstock.fleet.router.upstream import note_failure
from penstock.store.key_ring import KeyRing
from penstock.tenants import ApiKey
from tests.fakes.fake_replica import FakeReplica
from tests.unit.fleet.conftest import QUICK, make_replica, running_gateway, until
from tests.unit.fleet.test_gateway import framed

DIGEST = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"  # of secret


@pytest.fixture(autouse=True)
def informed(caplog):
    caplog.set_level(logging.INFO)


def lines(caplog, message):
    """Return the named values of every line that begins so."""
    return [record.penstock_fields for record in caplog.records if record.getMessage().startswith(message)]


def from_cause(error, cause):
    error.__cause__ = cause
    return error


def test_a_certificate_that_is_not_trusted_is_called_that_whoever_asks():
    cause = ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED]")
    cause.verify_message = "self-signed certificate"
    for error in (ReplicaUnreachable(), aiohttp.ClientConnectorCertificateError(None, cause)):
        replica = make_replica(1)
        note_failure(replica, from_cause(error, cause))
        assert replica.breaker.reason.endswith("its certificate is not trusted (self-signed certificate)")


async def test_a_replica_without_tls_at_an_https_url_is_called_that(caplog):
    async with FakeReplica().running() as one:
        url = one.url.replace("http", "https")
        config = msgspec.structs.replace(QUICK, replicas=(ReplicaEntry(url=url),))
        async with running_gateway(config=config) as running:
            assert "no TLS connection comes about" in running.gateway.pool.find(url).breaker.reason


FOUND, LOST = "a replica was found", "a replica was lost"


def test_who_comes_and_goes_is_a_line_each_with_its_source_and_the_reason(clock, caplog):
    pool = ReplicaPool(HealthSection(), clock)
    registration = Registration(pool, lease_seconds=10)
    one, other = ReplicaEntry(url="http://one:80"), ReplicaEntry(url="http://other:80")
    pool.replace("static", [one])
    for _ in range(3):  # heartbeats
        registration.register(other)
    assert lines(caplog, FOUND) == [
        {"replica": "one:80", "source": "static"},
        {"replica": "other:80", "source": "registration"},
    ]
    registration.leave(other.url)
    registration.register(one)
    pool.find(one.url).num_in_flight = 2
    pool.replace("static", [], lambda url: f"{url} was struck out")
    clock.now += 10
    registration.expire()
    assert lines(caplog, FOUND)[2:] == [{"replica": "one:80", "source": "registration", "also_known_to": "static"}]
    assert lines(caplog, LOST) == [
        {
            "replica": "other:80",
            "source": "registration",
            "reason": "its registration was taken back",
            "open_requests": 0,
        },
        {
            "replica": "one:80",
            "source": "static",
            "reason": "http://one:80 was struck out",
            "known_to": "registration",
        },
        {
            "replica": "one:80",
            "source": "registration",
            "reason": "it was not heard from for 10 s",
            "open_requests": 2,
        },
    ]
    assert not list(pool)


def test_a_replica_that_changes_its_kind_is_lost_and_found(clock, caplog):
    pool = ReplicaPool(HealthSection(), clock)
    for kind in ("penstock", "vllm"):
        pool.add("registration", ReplicaEntry(url="http://one:80", kind=kind))
    assert [line["reason"] for line in lines(caplog, LOST)] == [
        "its kind or key_file has changed: it is taken for another"
    ]
    assert len(lines(caplog, FOUND)) == 2


def test_a_fleet_that_comes_and_goes_all_the_time_does_not_fill_the_log(clock, caplog):
    pool = ReplicaPool(HealthSection(), clock)
    entries = [ReplicaEntry(url=f"http://replica-{number}:80") for number in range(100)]
    for _ in range(5):
        pool.replace("dns", entries)
        pool.replace("dns", [])
    assert len(caplog.records) == 200
    clock.now += 60
    pool.replace("dns", entries[:1])
    assert caplog.records[-1].penstock_fields["lines_left_out"] == 800


def test_an_ejection_and_a_return_are_lines_with_reason_and_duration(clock, caplog):
    pool = ReplicaPool(HealthSection(first_backoff_seconds=2.0), clock)
    breaker = pool.add("test", ReplicaEntry(url="http://replica:80")).breaker
    breaker.on_probe(True)
    clock.now += 60
    breaker.on_failure("it refuses connections", is_fatal=True)
    clock.now += 2.5
    breaker.on_failure("it refuses connections", is_fatal=True)  # still dead
    clock.now += 4.0
    breaker.on_probe(True)
    breaker.on_answer()
    assert lines(caplog, "a replica is ejected") == [
        {
            "replica": "replica:80",
            "reason": "for 2 s: it refuses connections",
            "wait_seconds": 2.0,
            "ejections": 1,
            "before": "ready",
            "before_seconds": 60.0,
        }
    ]
    (back,) = lines(caplog, "a replica is back, on trial")
    assert (back["before"], back["before_seconds"]) == ("ejected", 6.5)
    assert [line["reason"] for line in lines(caplog, "a replica is ready")] == [
        "it says that it is ready",
        "it answers requests",
    ]


def test_a_replica_that_comes_and_goes_all_the_time_does_not_fill_the_log(clock, caplog):
    pool = ReplicaPool(HealthSection(), clock)
    breaker = pool.add("test", ReplicaEntry(url="http://replica:80")).breaker
    for _ in range(500):
        breaker.on_probe(True)
        breaker.on_probe(False, "draining")
        clock.now += 0.1
    assert 10 <= len(lines(caplog, "a replica is")) <= 20


async def test_a_stream_that_moves_is_a_line_that_names_both_replicas(caplog):
    async with (
        FakeReplica(answer=framed("a", "b", "c", fails_after=2)).running() as bad,
        FakeReplica(answer=framed("a", "b", "c")).running() as good,
        running_gateway(bad, good) as running,
    ):
        while not bad.received:
            answer = await running.ask(stream=True)
    (line,) = lines(caplog, "a stream goes on with another replica")
    assert (line["failed"], line["replica"], line["tokens"]) == (bad.name, good.name, 2)
    assert line["reason"] in ("it broke a connection", "it ended a stream early")
    assert line["request_id"] == answer.headers["x-request-id"]


async def test_a_stream_that_nobody_can_go_on_with_is_a_line(caplog):
    async with FakeReplica(answer=framed("a", "b", fails_after=1)).running() as bad, running_gateway(bad) as running:
        await running.ask(stream=True)
    assert {line["failed"] for line in lines(caplog, "a stream is lost")} == {bad.name}


async def test_a_replica_that_needs_a_key_is_a_line_that_says_to_give_one(caplog):
    async with FakeReplica(key="inner").running() as one, running_gateway(one):
        pass
    (line,) = lines(caplog, "a replica is not ready")
    assert line == {
        "replica": one.name,
        "reason": "/v1/models answers 401: give key_file, a file with a key that it takes",
    }


async def test_a_key_that_a_replica_does_not_know_is_a_line_that_names_its_file(caplog, tmp_path):
    key_file = tmp_path / "replica.key"
    key_file.write_text("wrong")
    config = msgspec.structs.replace(QUICK, key_file=str(key_file))
    async with FakeReplica(key="inner").running() as one, running_gateway(one, config=config) as running:
        key_file.write_text("inner")
        await until(lambda: running.gateway.pool.find(one.url).is_up)
        key_file.write_text("old")
        await until(lambda: lines(caplog, "a replica does not tell this gateway"))
    assert str(key_file) in lines(caplog, "a replica is not ready")[0]["reason"]
    (record,) = [record for record in caplog.records if record.getMessage().startswith("a replica does not tell")]
    assert "/metrics answers 401 to the key in" in record.getMessage()


async def test_a_replica_that_refuses_a_key_of_the_gateways_is_a_line(caplog):
    async def refuse(replica, request, body):
        return web.json_response({"error": {"code": "invalid_api_key"}}, status=401)

    ring = KeyRing((ApiKey("alice", DIGEST),), needs_keys=True)
    async with FakeReplica(answer=refuse).running() as one, running_gateway(one, ring=ring) as running:
        assert (await running.ask({"authorization": "Bearer secret"})).status == 401
    (line,) = lines(caplog, "a replica answers 401 to a key that this gateway knows")
    assert line == {"replica": one.name, "tenant": "alice"}


async def test_a_foreign_replica_that_does_not_take_the_gateways_key_is_no_mistake_of_the_caller(caplog):
    async def refuse(replica, request, body):
        refusal = {"error": {"code": "invalid_api_key"}}
        return web.json_response(refusal, status=401, headers={"www-authenticate": "Basic"})

    ring = KeyRing((ApiKey("alice", DIGEST),), needs_keys=True)
    async with FakeReplica(answer=refuse).running() as one, running_gateway(one, ring=ring, kind="vllm") as running:
        response = await running.ask({"authorization": "Bearer secret"})
        assert (response.status, (await response.json())["error"]["code"]) == (503, "engine_unavailable")
        assert "www-authenticate" not in response.headers
    assert lines(caplog, "a replica answers 401 to the gateway's own key")
