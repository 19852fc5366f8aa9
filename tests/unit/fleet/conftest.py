"""Replicas without servers, and a gateway in front of fake servers."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import aiohttp
import msgspec
import pytest

from penstock.connection_limits import ConnectionLimits
from penstock.fleet.adapters.interface import Load, ServedModel
from penstock.fleet.config import FleetConfig, HealthSection, QueueSection, ReplicaEntry
from penstock.fleet.gateway import Gateway
from penstock.fleet.replica import Replica
from penstock.fleet.rollout.book import RolloutBook
from penstock.fleet.router.query import RouteQuery, read_head
from penstock.metering.tenancy import Tenancy
from penstock.store.key_ring import KeyRing
from tests.fakes.fake_replica import FakeReplica

QUICK = FleetConfig(
    health=HealthSection(probe_seconds=0.05, first_backoff_seconds=0.05),
    queue=QueueSection(max_waiting_per_tenant=2, max_wait_seconds=0.2, hold_seconds=0.2),
)


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def make_replica(number: int, running: float = 0, clock: FakeClock | None = None) -> Replica:
    replica = Replica(ReplicaEntry(url=f"http://replica-{number}:80"), HealthSection(), clock or FakeClock())
    replica.models = (ServedModel("tiny"),)
    replica.breaker.on_probe(True)
    replica.note_load(Load(num_running=running))
    return replica


def make_query(session: str | None = None, tenant: str = "a", **fields: object) -> RouteQuery:
    head = read_head(msgspec.json.encode({"model": "tiny", **fields}))
    return RouteQuery(head, model="tiny", tenant=tenant, session=session)


@dataclass
class Running:
    gateway: Gateway
    url: str
    client: aiohttp.ClientSession

    async def ask(self, headers: dict[str, str] | None = None, **fields: object) -> aiohttp.ClientResponse:
        body = {"model": "tiny", "prompt": "hi", **fields}
        response = await self.client.post(f"{self.url}/v1/completions", json=body, headers=headers)
        await response.read()
        return response


@contextlib.asynccontextmanager
async def running_gateway(
    *replicas: FakeReplica,
    config: FleetConfig = QUICK,
    ring: KeyRing | None = None,
    kind: str = "penstock",
    book: RolloutBook | None = None,
    tenancy: Tenancy | None = None,
    limits: ConnectionLimits | None = None,
    **entry: int,
) -> AsyncIterator[Running]:
    entries = tuple(ReplicaEntry(url=replica.url, kind=kind, version=replica.version, **entry) for replica in replicas)
    config = msgspec.structs.replace(config, replicas=config.replicas + entries)
    meter = store = secret = None
    if tenancy is not None:
        ring, meter, store, secret = tenancy.ring, tenancy.meter, tenancy.store_identity, tenancy.fleet_secret
    gateway = Gateway(
        config, ring, meter=meter, store=store, fleet_secret=secret,
        max_body_bytes=4096, limits=limits, rollout_book=book,
    )  # fmt: skip
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    await gateway.start(listener, drain_seconds=0.5)
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as client:
            yield Running(gateway, f"http://127.0.0.1:{listener.getsockname()[1]}", client)
    finally:
        await gateway.stop()


async def until(condition: Callable[[], object]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition never came true")
