"""One replica as a Ray Serve deployment: a server beside the actor, and its address in the directory.

Gateways find the address and send requests to the server directly; Ray places, watches, replaces and ends it. Callers
who come through Ray Serve's proxy or a handle all the same are passed on. Knows nothing of how many replicas there are.
"""

import asyncio
import logging
import os
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from typing import Any

import aiohttp
import msgspec
import ray
from multidict import CIMultiDict
from ray.exceptions import RayError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from penstock.deploy.ray_serve.ranks import RankDevices
from penstock.deploy.ray_serve.server import LeashedServer, reachable_url
from penstock.deploy.ray_serve.settings import ReplicaSettings
from penstock.errors import EngineUnavailable, RemoteError
from penstock.fleet.discovery.ray_directory import NAMESPACE, ReplicaDirectory, directory_name
from penstock.fleet.router.upstream import UPSTREAM_ERRORS, request_headers, response_headers, target
from penstock.protocol.errors import reply_for
from penstock.telemetry import log_event

_ANNOUNCE_SECONDS = 1.0
_LEASE_SECONDS = 5.0

log = logging.getLogger("penstock.ray")


class PenstockReplica:
    """What Ray Serve calls a deployment's class."""

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        self._settings = ReplicaSettings(**settings)
        self._ranks = await RankDevices.claim(self._settings.bundles)
        node_address = ray.util.get_node_ip_address()
        host = self._settings.host or node_address
        environ = dict(os.environ)
        if self._ranks.devices:
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(self._ranks.devices)
        self._server = LeashedServer(
            self._settings.arguments, host, self._settings.port, environ=environ, key_file=self._settings.key_file
        )
        await self._server.start(self._settings.start_seconds)
        self.url = reachable_url(host, self._server.port, node_address)
        self._directory: Any = None  # the actor's handle
        self._announcing = asyncio.create_task(self._announce())

    async def check_health(self) -> None:
        """Raise unless the server is ready; Ray Serve replaces a replica that fails this three times."""
        if not await self._server.is_ready():
            raise RemoteError(f"the server is not ready: {self._server.replica.breaker.reason}")

    async def __del__(self) -> None:
        """Drain: no gateway sends more, and what was sent is finished."""
        self._announcing.cancel()
        await asyncio.gather(self._announcing, return_exceptions=True)
        try:
            await self._find_directory().withdraw.remote(self.url)
        except RayError as error:
            log_event(log, f"the directory still has this replica for a moment: {error}", level=logging.WARNING)
        await self._server.stop(self._settings.drain_seconds)

    def record_replica_metadata(self) -> dict[str, str]:
        """Tell request routers which server this is."""
        return {"url": self.url}

    async def record_routing_stats(self) -> dict[str, float]:
        """Tell request routers how busy the server is."""
        return await self.record_autoscaling_stats()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell the autoscaling policy how busy the server is."""
        await self._server.is_ready()
        load: dict[str, float | None] = asdict(self._server.replica.load)
        return {name: value for name, value in load.items() if value is not None}

    async def __call__(self, request: Request) -> Response:
        """Pass on a request that came through Ray Serve's proxy."""
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        try:
            response = await self._send(request.method, path, await request.body(), request.headers)
        except UPSTREAM_ERRORS:
            reply = reply_for(EngineUnavailable("the server beside this replica does not answer; try again"))
            return Response(reply.body, reply.status, headers=dict(reply.headers), media_type="application/json")
        return StreamingResponse(
            _pieces(response), status_code=response.status, headers=response_headers(response.headers)
        )

    async def post(
        self, body: dict[str, Any], path: str = "/v1/chat/completions", headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[bytes]:
        """Pass on a request that came through a handle: `handle.options(stream=True).post.remote(body)`."""
        given = {"content-type": "application/json", **(headers or {})}
        async for piece in _pieces(await self._send("POST", path, msgspec.json.encode(body), given)):
            yield piece

    async def _send(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        server = self._server.replica
        request_id = headers.get("x-request-id") or uuid.uuid4().hex
        sent = request_headers(CIMultiDict(headers.items()), server, request_id, has_keys=False)
        return await self._server.session.request(method, target(server, path), data=body or None, headers=sent)

    async def _announce(self) -> None:
        """Say that this replica is there, until it drains."""
        is_failing = False
        while True:
            try:
                if await self._server.is_ready():
                    await self._find_directory().announce.remote(self.url, _LEASE_SECONDS)
                is_failing = False
            except RayError as error:
                self._directory = None
                if not is_failing:
                    log_event(log, f"the directory does not answer: {error}", level=logging.WARNING)
                is_failing = True
            await asyncio.sleep(_ANNOUNCE_SECONDS)

    def _find_directory(self) -> Any:
        """Return the directory's actor, made by whichever replica needs it first."""
        if self._directory is None:
            options = {
                "name": directory_name(self._settings.application),
                "namespace": NAMESPACE,
                "get_if_exists": True,
                "lifetime": "detached",
                "max_restarts": -1,
                "num_cpus": 0,
                # Not in this replica's placement group, as whatever Serve's replicas start is unless it says so: with
                # the group the directory would go, and could be started nowhere again.
                "scheduling_strategy": "DEFAULT",
            }
            self._directory = ray.remote(ReplicaDirectory).options(**options).remote()
        return self._directory


async def _pieces(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async with response:
        async for piece in response.content.iter_any():
            yield piece
