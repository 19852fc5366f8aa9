"""A server as the gateway sees one: scripted, on a real port."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web

from penstock.protocol.block_events import BlockMessage, encode
from penstock.protocol.identity import IDENTITY_HEADER

Answer = Callable[["FakeReplica", web.Request, dict], Awaitable[web.StreamResponse]]


async def say_hello(replica: "FakeReplica", request: web.Request, body: dict) -> web.StreamResponse:
    return web.json_response({"text": "hello", "from": replica.port})


@dataclass
class FakeReplica:
    """Set `answer` to change what it does with requests, `ready` what it says of itself."""

    models: tuple[str, ...] = ("tiny",)
    answer: Answer = say_hello
    files: Callable[["FakeReplica", web.Request], Awaitable[web.StreamResponse]] | None = None
    ready: int = 200
    identity: str = ""  # what it says of itself with that
    key: str | None = None  # that its models and metrics need
    version: str = "stable"  # that it is known under
    metrics: str = ""
    received: list[dict] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    port: int = 0
    block_messages: list[BlockMessage] | None = None  # what it tells whoever listens; None: it has no such route
    num_listeners: int = 0  # so far
    listened: asyncio.Event = field(default_factory=asyncio.Event)

    _runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.received.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        return await self.answer(self, request, body)

    async def _files(self, request: web.Request) -> web.StreamResponse:
        assert self.files is not None
        return await self.files(self, request)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        if self._is_closed_to(request):
            return web.Response(status=401)
        return web.json_response({"data": [{"id": name, "max_context_tokens": 512} for name in self.models]})

    async def _ready(self, request: web.Request) -> web.StreamResponse:
        headers = {IDENTITY_HEADER: self.identity} if self.identity else None
        return web.json_response({"status": "x"}, status=self.ready, headers=headers)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=401) if self._is_closed_to(request) else web.Response(text=self.metrics)

    def _is_closed_to(self, request: web.Request) -> bool:
        return self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}"

    async def _block_events(self, request: web.Request) -> web.StreamResponse:
        if self.block_messages is None:
            return web.Response(status=404)
        self.num_listeners += 1
        self.listened.set()
        response = web.StreamResponse()
        await response.prepare(request)
        for message in self.block_messages:
            await response.write(encode(message))
        await asyncio.sleep(60)
        return response

    async def die(self) -> None:
        """Refuse connections from now on, and cut those that there are, as a killed process does."""
        assert self._runner is not None and self._runner.server is not None
        for site in list(self._runner.sites):
            await site.stop()
        for handler in self._runner.server.connections:
            if handler.transport is not None:
                handler.transport.abort()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["FakeReplica"]:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        for path in ("/ready", "/health"):
            app.router.add_get(path, self._ready)
        app.router.add_get("/metrics", self._metrics)
        if self.files is not None:
            app.router.add_route("*", "/v1/{kind:files|batches}{rest:.*}", self._files)
        app.router.add_get("/block_events", self._block_events)
        app.router.add_post("/v1/{path:.+}", self._post)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        self._runner = runner
        site = web.TCPSite(runner, "127.0.0.1", self.port)
        await site.start()
        self.port = runner.addresses[0][1]
        try:
            yield self
        finally:
            await runner.cleanup()
