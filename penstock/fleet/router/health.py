"""Asks every replica, again and again: ready? which models? how busy?

Tells the breakers what it finds. Knows nothing of requests.
"""

import asyncio
from collections.abc import Callable

import aiohttp

from penstock.fleet.replica import Replica, ReplicaPool
from penstock.fleet.router.upstream import UPSTREAM_ERRORS, error_code, note_failure, own_headers, target

_MODELS_EVERY = 10  # probes


class HealthMonitor:
    def __init__(self, pool: ReplicaPool, session: aiohttp.ClientSession, on_probe: Callable[[], None]) -> None:
        """`on_probe` is called behind each probe: somebody may be served now."""
        self._pool = pool
        self._session = session
        self._on_probe = on_probe
        self._timeout = aiohttp.ClientTimeout(total=pool.health.probe_timeout_seconds)
        self._num_probes: dict[str, int] = {}
        self._under_way: set[str] = set()  # URLs

    async def run(self) -> None:
        """Probe for ever; at once when replicas were added. One that hangs delays nobody else's probe."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._pool.added.clear()
                replicas = self._known()
                for replica in replicas:
                    if replica.url not in self._under_way:
                        group.create_task(self._probe_once(replica))
                try:
                    async with asyncio.timeout(self._pool.health.probe_seconds):
                        await self._pool.added.wait()
                except TimeoutError:
                    continue

    async def probe_all(self) -> None:
        """Probe every replica once."""
        await asyncio.gather(*[self._probe_once(replica) for replica in self._known()])

    def _known(self) -> list[Replica]:
        replicas = list(self._pool)
        self._num_probes = {replica.url: self._num_probes.get(replica.url, 0) for replica in replicas}
        return replicas

    async def _probe_once(self, replica: Replica) -> None:
        self._under_way.add(replica.url)
        try:
            await self._probe(replica)
        finally:
            self._under_way.discard(replica.url)
        self._on_probe()

    async def _probe(self, replica: Replica) -> None:
        try:
            status, body = await self._get(replica, replica.adapter.ready_path)
        except UPSTREAM_ERRORS as error:
            note_failure(replica, error)
            return
        if status != 200:
            replica.breaker.on_probe(
                False, f"{replica.adapter.ready_path} answers {status} {error_code(body)}".rstrip()
            )
            return
        count = self._num_probes.get(replica.url, 0)
        if not replica.models or count % _MODELS_EVERY == 0:
            await self._read_models(replica)
        self._num_probes[replica.url] = count + 1
        if not replica.models:
            replica.breaker.on_probe(False, "it tells no models; a key_file may be missing")
            return
        await self._read_load(replica)
        replica.breaker.on_probe(True)

    async def _read_models(self, replica: Replica) -> None:
        try:
            status, body = await self._get(replica, replica.adapter.models_path)
            if status == 200:
                replica.models = replica.adapter.models(body)
        except (*UPSTREAM_ERRORS, ValueError):
            return  # what was known stays

    async def _read_load(self, replica: Replica) -> None:
        try:
            status, body = await self._get(replica, replica.adapter.metrics_path)
            if status == 200:
                replica.note_load(replica.adapter.load(body.decode("utf-8", "replace")))
        except (*UPSTREAM_ERRORS, ValueError):
            return  # requests in flight are known all the same

    async def _get(self, replica: Replica, path: str) -> tuple[int, bytes]:
        url, headers = target(replica, path), own_headers(replica)
        async with self._session.get(url, headers=headers, timeout=self._timeout, allow_redirects=False) as response:
            return response.status, await response.read()
