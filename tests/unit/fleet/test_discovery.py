"""Where replicas come from, and how they go again."""

import asyncio
import contextlib
import logging
import re
import socket

import aiohttp
import pytest
from aiohttp import web

from penstock.errors import ConfigError, RemoteError
from penstock.fleet.adapters.interface import ServedModel
from penstock.fleet.config import DnsSection, HealthSection, KubernetesSection, ReplicaEntry
from penstock.fleet.discovery.dns import DnsDiscovery
from penstock.fleet.discovery.interface import Discovery, follow
from penstock.fleet.discovery.kubernetes import KubernetesDiscovery
from penstock.fleet.discovery.registration import Registration
from penstock.fleet.replica import ReplicaPool
from tests.unit.fleet.conftest import until


def entry(number: int) -> ReplicaEntry:
    return ReplicaEntry(url=f"http://replica-{number}:80")


@pytest.fixture
def pool(clock):
    return ReplicaPool(HealthSection(), clock)


def urls(pool):
    return sorted(replica.url for replica in pool)


def test_a_source_replaces_its_own_replicas_only(pool):
    pool.replace("one", [entry(1), entry(2)])
    pool.replace("other", [entry(2), entry(3)])
    pool.replace("one", [])
    assert urls(pool) == ["http://replica-2:80", "http://replica-3:80"]


def test_a_replica_that_stays_keeps_what_is_known_of_it(pool):
    pool.replace("one", [entry(1)])
    (replica,) = pool
    pool.replace("one", [entry(1), entry(2)])
    assert pool.find("http://replica-1:80/") is replica


def test_what_a_replica_is_stays_the_word_of_who_has_known_it_longest(pool):
    listed = ReplicaEntry(url="http://replica-1:80", version="candidate", max_in_flight=2)
    replica = pool.add("static", listed)
    for _ in range(2):  # heartbeats
        assert pool.add("registration", entry(1)) is replica
        assert (replica.version, replica.entry.max_in_flight) == ("candidate", 2)
    pool.add("static", ReplicaEntry(url="http://replica-1:80", version="stable", max_in_flight=3))
    assert (replica.version, replica.entry.max_in_flight) == ("stable", 3)
    pool.remove("static", "http://replica-1:80", "gone")
    pool.add("registration", ReplicaEntry(url="http://replica-1:80", version="other"))
    assert pool.find("http://replica-1:80") is replica and replica.version == "other"


def test_one_that_turns_out_to_be_of_another_kind_is_another_replica(pool):
    before = pool.add("registration", entry(1))
    pool.added.clear()
    after = pool.add("registration", ReplicaEntry(url="http://replica-1:80", kind="vllm"))
    assert after is not before and after.adapter.kind == "vllm" and list(pool) == [after]
    assert before.is_leaving and not after.is_leaving and pool.added.is_set()


def test_one_that_leaves_gets_nothing_more(pool):
    replica = pool.add("one", entry(1))
    replica.models = (ServedModel("tiny"),)
    replica.breaker.on_probe(True)
    assert replica.is_usable
    pool.remove("one", entry(1).url, "gone")
    assert not replica.is_usable


def test_a_registered_replica_stays_for_as_long_as_it_says_so(pool, clock):
    registration = Registration(pool, lease_seconds=10)
    registration.register(entry(1))
    for _ in range(3):
        clock.now += 8
        registration.register(entry(1))
        registration.expire()
    assert urls(pool) == ["http://replica-1:80"]
    clock.now += 10
    registration.expire()
    assert urls(pool) == []


def test_a_replica_may_leave_by_itself(pool):
    registration = Registration(pool, lease_seconds=10)
    registration.register(entry(1))
    assert registration.leave("http://replica-1:80/")
    assert not registration.leave("http://replica-1:80")
    assert urls(pool) == []


async def test_the_addresses_of_a_name_are_replicas():
    found = await DnsDiscovery(DnsSection(name="localhost", port=9000, kind="vllm")).find()
    assert ReplicaEntry(url="http://127.0.0.1:9000", kind="vllm") in found


async def test_a_name_without_addresses_is_said(monkeypatch):
    def fail(*_, **__):
        raise socket.gaierror(8, "not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(RemoteError, match="nowhere"):
        await DnsDiscovery(DnsSection(name="nowhere", port=9000)).find()


async def test_what_can_be_no_name_is_said():
    with pytest.raises(RemoteError, match=r"a\.\.b can be no host's name"):
        await DnsDiscovery(DnsSection(name="a..b", port=9000)).find()


class Listed(Discovery):
    """Tells of the same URLs whenever it is asked."""

    name, refresh_seconds = "listed", 0.0

    def __init__(self, *urls):
        self.num_asked = 0
        self.urls = urls

    async def find(self):
        self.num_asked += 1
        return [ReplicaEntry(url=url) for url in self.urls]


async def test_what_is_found_and_can_be_no_replica_is_said_once_and_passed_over(pool, caplog):
    bad = ["http://a..b:80", "http://node 1:80", "http://[::1:80", f"http://{'x' * 64}:80", "http://a:99999"]
    source = Listed("http://replica-1:80", *bad, "http://replica-2:80")
    following = asyncio.create_task(follow(source, pool))
    await until(lambda: source.num_asked >= 3)
    following.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await following
    assert urls(pool) == ["http://replica-1:80", "http://replica-2:80"]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(bad) and all("is no replica" in line for line in said)


SLICE = {
    "ports": [{"name": "http", "port": 8000}, {"name": "other", "port": 1}],
    "endpoints": [
        {"addresses": ["10.0.0.1"], "conditions": {"ready": True}},
        {"addresses": ["10.0.0.2"], "conditions": {"ready": False}},
        {"addresses": ["fd00::3"]},
    ],
}


ODD_SLICES = [
    7,
    {"ports": [3, {"name": "http", "port": 8000}], "endpoints": [None, {"addresses": "10.0.0.9"}, {"addresses": [{}]}]},
    {"ports": None, "endpoints": {"addresses": ["10.0.0.8"]}},
    SLICE,
]

# Of a service with addresses of both families: one pod has both, one is so new that it is in one slice only.
DUAL_SLICES = [
    {
        "addressType": family,
        "ports": [{"name": "http", "port": 8000}],
        "endpoints": [
            {"addresses": [address], "targetRef": {"kind": "Pod", "uid": uid}} for uid, address in pods.items()
        ],
    }
    for family, pods in (("IPv6", {"a": "fd00::1", "b": "fd00::2"}), ("IPv4", {"a": "10.0.0.1"}))
]
ENDING_SLICES = [
    {
        "ports": SLICE["ports"],
        "endpoints": [
            {"addresses": ["10.0.0.1"], "conditions": {"ready": False, "serving": True, "terminating": True}},
            {"addresses": ["10.0.0.2"], "conditions": {"ready": False}},
        ],
    }
]
OTHER_SLICES = {"odd": ODD_SLICES, "dual": DUAL_SLICES, "ending": ENDING_SLICES, "nowhere": []}


@pytest.fixture
async def cluster(tmp_path):
    """A fake API server, and what a pod is given to speak to it."""
    (tmp_path / "token").write_text("pod-token\n")
    (tmp_path / "namespace").write_text("models")
    seen = []

    async def answer(request):
        seen.append((request.path, request.query["labelSelector"], request.headers["authorization"]))
        slices = next((found for name, found in OTHER_SLICES.items() if name in str(request.url)), [SLICE])
        if "penstock" not in str(request.url):
            refusal = {"kind": "Status", "message": 'endpointslices is forbidden: User "x"\ncannot list them'}
            return web.json_response(refusal, status=403)
        return web.json_response({"kind": "Status"} if "unlisted" in str(request.url) else {"items": slices})

    app = web.Application()
    app.router.add_get("/{path:.+}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as session:

        def discovery(**fields):
            section = KubernetesSection(**{"service": "penstock", "port": "http", **fields})
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            return KubernetesDiscovery(section, session, account=tmp_path, api=url)

        yield discovery, seen
    await runner.cleanup()


async def test_two_ports_of_a_service_are_two_sources_of_replicas(cluster):
    discovery, _ = cluster
    pool = ReplicaPool(HealthSection())
    for found in (discovery(port=8000), discovery(port=9000)):
        pool.replace(found.name, await found.find())
    assert sorted(replica.url for replica in pool) == [
        "http://10.0.0.1:8000", "http://10.0.0.1:9000", "http://[fd00::3]:8000", "http://[fd00::3]:9000"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("known", "url"),
    [
        *(("http://a", url) for url in ("HTTP://a", "http://A/", "http://a:80", "http://a.")),
        ("http://[::1]", "http://[0::1]/"),
        ("http://127.0.0.1", "http://localhost/"),
        ("http://localhost:80", "http://127.0.0.1"),
    ],
)
def test_a_server_is_one_replica_however_its_url_is_written(known, url):
    pool = ReplicaPool(HealthSection())
    first = pool.add("file", ReplicaEntry(url=known))
    assert pool.add("registered", ReplicaEntry(url=url)) is first
    assert pool.find(url) is first
    registration = Registration(pool, 10.0)
    registration.register(ReplicaEntry(url=url))
    assert registration.leave(known) and len(pool) == 1


def test_servers_behind_one_proxy_have_names_of_their_own(pool):
    names = [pool.add("file", ReplicaEntry(url=f"http://proxy/{path}/")).name for path in ("a", "b")]
    assert names == ["proxy/a", "proxy/b"]  # or metrics would have each series twice


async def test_ready_endpoints_of_a_service_are_replicas(cluster):
    discovery, seen = cluster
    found = await discovery().find()
    assert [item.url for item in found] == ["http://10.0.0.1:8000", "http://[fd00::3]:8000"]
    assert seen == [
        (
            "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices",
            "kubernetes.io/service-name=penstock",
            "Bearer pod-token",
        )
    ]


async def test_replicas_that_are_found_are_asked_with_the_key_of_their_section(cluster):
    discovery, _ = cluster
    found = await discovery(key_file="/keys/a").find()
    found += await DnsDiscovery(DnsSection(name="localhost", port=9000, key_file="/keys/a")).find()
    assert {item.key_file for item in found} == {"/keys/a"}


async def test_slices_and_endpoints_that_are_none_hide_no_others(cluster):
    discovery, _ = cluster
    found = await discovery(service="penstock-odd").find()
    assert [item.url for item in found] == ["http://{}:8000", "http://10.0.0.1:8000", "http://[fd00::3]:8000"]


async def test_a_pod_with_addresses_of_both_families_is_one_replica(cluster):
    discovery, _ = cluster
    found = await discovery(service="penstock-dual").find()
    assert [item.url for item in found] == ["http://10.0.0.1:8000", "http://[fd00::2]:8000"]


async def test_why_an_endpoint_is_no_replica_any_more_is_known(cluster):
    discovery, _ = cluster
    source = discovery(service="penstock-ending")
    assert await source.find() == []
    assert source.why_lost("http://10.0.0.1:8000") == "its pod is being ended"
    assert source.why_lost("http://10.0.0.2:8000") == "its pod is not ready"
    assert "no endpoint at this address" in source.why_lost("http://10.0.0.3:8000")


async def test_a_source_says_why_it_lost_what_it_had_found(pool, caplog):
    caplog.set_level(logging.INFO)
    source = Listed("http://replica-1:80")
    following = asyncio.create_task(follow(source, pool))
    await until(lambda: urls(pool) == ["http://replica-1:80"])
    source.urls = ()
    await until(lambda: not urls(pool))
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    said = [(record.getMessage(), record.penstock_fields) for record in caplog.records]
    lost = {"replica": "replica-1:80", "source": "listed", "reason": "it is told of no more", "open_requests": 0}
    assert said == [
        ("a replica was found", {"replica": "replica-1:80", "source": "listed"}),
        ("a replica was lost", lost),
        ("no replica is found: it tells of none", {"source": "listed"}),
    ]


class Troubled(Listed):
    """Fails as it is told to."""

    error: str | None = None

    async def find(self):
        found = await super().find()
        if self.error is not None:
            raise RemoteError(self.error)
        return found


async def test_what_is_wrong_with_a_source_is_said_once_and_so_is_its_end(pool, caplog):
    caplog.set_level(logging.INFO, "penstock.discovery")
    source = Troubled("http://replica-1:80")
    following = asyncio.create_task(follow(source, pool))
    for error in (None, "it is away", "it refuses", None):
        source.error, asked = error, source.num_asked
        await until(lambda asked=asked: source.num_asked > asked + 2)
        assert urls(pool) == ["http://replica-1:80"]
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    said = [record.getMessage() for record in caplog.records if record.name == "penstock.discovery"]
    assert said == [
        "replicas stay as they were: it is away",
        "replicas stay as they were: it refuses",
        "replicas are found",
    ]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            {"service": "penstock-nowhere"},
            "nowhere of namespace models has no endpoint slices; is that its name",
        ),
        ({"service": "penstock", "port": "web"}, "has no port of the name 'web', but: http, other"),
        ({"service": "penstock-ending"}, r"has no endpoint that is ready \(2 that are not\)"),
    ],
)
async def test_why_a_service_has_no_replicas_is_known(cluster, fields, why):
    discovery, _ = cluster
    source = discovery(**fields)
    assert await source.find() == []
    assert re.search(why, source.why_none())


async def test_an_answer_that_is_no_list_takes_no_replica_away(cluster):
    discovery, _ = cluster
    with pytest.raises(RemoteError, match="no list"):
        await discovery(service="penstock-unlisted").find()


@pytest.mark.parametrize("token", [b"a\nb", b"\xff\xfe", b"caf\xc3\xa9\x00"])
async def test_a_token_that_can_be_none_is_said(cluster, tmp_path, token):
    discovery, _ = cluster
    source = discovery()
    (tmp_path / "token").write_bytes(token)
    with pytest.raises(RemoteError, match="cannot be asked"):
        await source.find()
    (tmp_path / "token").write_bytes(b"another-token\n")  # as the cluster replaces it
    assert len(await source.find()) == 2


async def test_a_port_may_be_a_number(cluster):
    discovery, _ = cluster
    assert next(item.url for item in await discovery(port=9).find()) == "http://10.0.0.1:9"


async def test_an_api_that_refuses_is_said(cluster):
    discovery, _ = cluster
    with pytest.raises(RemoteError, match=r'403 to GET .*: endpointslices is forbidden: User "x" cannot list them'):
        await discovery(service="other").find()


async def test_outside_a_pod_it_says_so(monkeypatch, tmp_path):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(ConfigError, match="inside a Kubernetes pod"):
            KubernetesDiscovery(KubernetesSection(service="x", port=1), session, account=tmp_path)


@pytest.mark.parametrize(
    ("kind", "own", "expected"), [("penstock", None, "fleet"), ("penstock", "own", "own"), ("vllm", None, None)]
)
def test_the_fleets_key_is_for_our_own_servers_that_have_none(kind, own, expected):
    pool = ReplicaPool(HealthSection(), default_key_file="fleet")
    replica = pool.add("test", ReplicaEntry(url="http://replica:80", kind=kind, key_file=own))
    assert replica.key_file == expected


@pytest.mark.parametrize(
    ("num_up", "num_down", "is_needed"), [(0, 1, True), (1, 1, False), (1, 2, True), (2, 1, False)]
)
def test_a_replica_is_needed_while_fewer_than_half_of_its_model_are_up(pool, num_up, num_down, is_needed):
    replicas = [pool.add("test", entry(number)) for number in range(num_up + num_down)]
    for replica in replicas:
        replica.models = (ServedModel("tiny"),)
        replica.breaker.on_probe(True)
    elsewhere = pool.add("test", entry(9))
    elsewhere.models = (ServedModel("other"),)
    elsewhere.breaker.on_probe(True)
    for replica in replicas[num_up:]:
        replica.breaker.on_failure("gone", is_fatal=True)
    assert pool.is_needed(replicas[-1]) is is_needed


def test_one_that_leaves_is_watched_until_its_last_request_ends(pool):
    replica, idle = pool.add("one", entry(1)), pool.add("one", entry(2))
    replica.num_in_flight = 1
    pool.replace("one", [])
    assert pool.leaving == [replica] and idle.is_leaving and not list(pool)
    replica.num_in_flight = 0
    assert pool.leaving == []
