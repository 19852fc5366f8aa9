"""What a gateway makes of what replicas say of themselves: no circles, and who counts."""

import hashlib

import msgspec
import pytest

from penstock.fleet.config import ReplicaEntry
from penstock.fleet.introduction import Introductions
from penstock.protocol.identity import Identity
from penstock.store.key_ring import KeyRing
from penstock.tenants import ApiKey, KeyTerms
from tests.fakes.fake_replica import FakeReplica
from tests.unit.fleet.conftest import QUICK, make_replica, running_gateway, until

ADMIN = {"authorization": "Bearer secret"}


@pytest.fixture
def ring():
    digest = hashlib.sha256(b"secret").hexdigest()
    return KeyRing((ApiKey("operations", digest, KeyTerms(admin=True)),), needs_keys=True)


async def register(running, **entry):
    answer = await running.client.post(f"{running.url}/admin/replicas", json=entry, headers=ADMIN)
    return answer.status, await answer.json()


async def reports(running):
    answer = await running.client.get(f"{running.url}/admin/replicas", headers=ADMIN)
    return {item["url"]: item for item in (await answer.json())["replicas"]}


@pytest.mark.parametrize("kind", ["penstock", "vllm", "llama.cpp"])
async def test_a_gateway_is_not_registered_with_itself(ring, kind):
    async with running_gateway(ring=ring) as running:
        status, answer = await register(running, url=running.url, kind=kind)
        assert (status, answer["error"]["param"]) == (400, "url")
        assert "this gateway itself" in answer["error"]["message"]
        assert len(running.gateway.pool) == 0


async def test_a_gateway_is_not_registered_with_another(ring):
    async with running_gateway() as other, running_gateway(ring=ring) as running:
        status, answer = await register(running, url=other.url)
        assert status == 400
        assert "another gateway" in answer["error"]["message"]


async def test_a_gateway_that_is_found_among_the_replicas_gets_nothing():
    async with FakeReplica().running() as one, running_gateway(one) as other:
        config = msgspec.structs.replace(QUICK, replicas=(ReplicaEntry(url=other.url),))
        async with running_gateway(config=config) as running:
            assert running.gateway.pool.find(other.url).breaker.reason.startswith("it is another gateway")
            assert (await running.ask()).status == 503
        assert not one.received


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        ({"url": "http://a:1/v1"}, "url"),
        ({"url": "a:1"}, "url"),
        ({"url": "http://a:1", "kind": "other"}, "kind"),
        ({"url": "http://a:1", "version": "a b"}, "version"),
    ],
)
async def test_a_registration_that_is_wrong_names_the_field(ring, entry, field):
    async with running_gateway(ring=ring) as running:
        status, answer = await register(running, **entry)
        assert (status, answer["error"]["param"]) == (400, field)
        assert f"{field}: " in answer["error"]["message"]


@pytest.mark.parametrize(
    ("identity", "store", "counted_by"),
    [
        (None, "unknown", "gateway"),
        (Identity("server", store=None, has_keys=True), "none", "gateway"),
        (Identity("server", store="other", has_keys=True), "other", "gateway"),
        (Identity("server", store="own", has_keys=False), "shared", "gateway"),
        (Identity("server", store="own", has_keys=True), "shared", "replica"),
    ],
)
def test_before_a_gateway_with_keys_only_a_replica_that_shares_store_and_keys_counts(ring, identity, store, counted_by):
    introductions, replica = Introductions(ring, "own"), make_replica(0)
    introductions.take(replica, identity)
    assert (introductions.store_of(replica), introductions.counter(replica)) == (store, counted_by)


@pytest.mark.parametrize(("has_keys", "store"), [(False, "own"), (True, None)])
def test_a_gateway_that_knows_no_limits_leaves_counting_to_the_replica(ring, has_keys, store):
    introductions, replica = Introductions(ring if has_keys else KeyRing(()), store), make_replica(0)
    introductions.take(replica, Identity("server", store="other", has_keys=True))
    assert introductions.counter(replica) == "replica"


async def test_the_admin_view_tells_who_counts_and_when_an_ejected_replica_is_tried_again(ring):
    gone = FakeReplica()
    async with gone.running():
        pass  # only to have a port, which is closed now
    async with FakeReplica(identity="server; store=abc; keys=on").running() as one:
        config = msgspec.structs.replace(QUICK, health=msgspec.structs.replace(QUICK.health, first_backoff_seconds=20))
        async with running_gateway(one, gone, ring=ring, config=config) as running:
            await until(lambda: running.gateway.pool.find(gone.url).breaker.seconds_until_try)
            told = await reports(running)
    assert (told[one.url]["store"], told[one.url]["counted_by"]) == ("other", "replica")
    assert told[one.url]["next_try_seconds"] is None
    assert told[gone.url]["standing"] == "ejected"
    assert 10 < told[gone.url]["next_try_seconds"] <= 20
