"""An app on the fake engine: in-process for most tests, on a real port where the network matters."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest
import uvicorn

from penstock.connection_limits import ConnectionLimits
from penstock.engine.tokenizer import Tokenizer
from penstock.request import NO_TARGETS
from penstock.server.app import create_app
from penstock.server.config import ServerConfig
from penstock.server.connection import connection_class
from penstock.server.context import ServerContext, build_context
from penstock.server.shared_prefixes import tokenize_prefixes
from penstock.store.database import Database
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.in_process_template import InProcessTemplate
from tests.fakes.tiny_tokenizer import make_tokenizer

MODEL = "tiny"


def make_config(**changes: object) -> ServerConfig:
    values: dict[str, object] = {
        "host": "127.0.0.1",
        "port": 0,
        "workers": 1,
        "served_name": MODEL,
        "keys": (),
        "chat_template": None,
        "targets": NO_TARGETS,
        "max_body_bytes": 64 * 1024,
        "drain_seconds": 1.0,
        "log_format": "json",
        **changes,
    }
    return ServerConfig(**values)  # type: ignore[arg-type]


@dataclass
class Service:
    """An app and the fakes behind it."""

    context: ServerContext
    engine: FakeEngine
    tokenizer: Tokenizer
    client: httpx.AsyncClient  # in-process

    async def post(self, path: str, *, key: str | None = None, **fields: object) -> httpx.Response:
        body = {"model": MODEL, **fields}
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return await self.client.post(path, json=body, headers=headers)

    async def chat(self, content: str = "hi", **fields: object) -> httpx.Response:
        return await self.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], **fields)

    async def complete(self, prompt: object = "hi", **fields: object) -> httpx.Response:
        return await self.post("/v1/completions", prompt=prompt, **fields)


@contextlib.asynccontextmanager
async def running_service(**changes: object) -> AsyncIterator[Service]:
    tokenizer = make_tokenizer()
    engine = FakeEngine(tokenizer)
    template = InProcessTemplate(tokenizer.chat_template)
    config = make_config(**changes)
    context = build_context(
        config,
        engine,
        tokenizer,
        template,
        created=1_700_000_000,
        database=Database.open(config.store) if config.store is not None else None,
        shared_prefixes=await tokenize_prefixes(config.shared_prefixes, tokenizer, template),
    )
    context.tenancy.start()
    transport = httpx.ASGITransport(create_app(context), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://penstock") as client:
        yield Service(context, engine, tokenizer, client)
    context.texts.close()
    await context.tenancy.close()


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with running_service() as running:
        yield running


@contextlib.asynccontextmanager
async def listening(context: ServerContext, limits: ConnectionLimits | None = None) -> AsyncIterator[str]:
    """Serve on a free port with uvicorn, as a worker does; yields the base URL."""
    http = connection_class(limits or ConnectionLimits(), context.metrics)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = uvicorn.Config(create_app(context), http=http, ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        server.force_exit = True
        await task


@pytest.fixture
async def address(service: Service) -> AsyncIterator[str]:
    async with listening(service.context) as url:
        yield url


@contextlib.contextmanager
def all_threads_taken() -> Iterator[None]:
    """Have slow work in all threads of the event loop's own meanwhile."""
    threads, is_done = ThreadPoolExecutor(1), threading.Event()
    asyncio.get_running_loop().set_default_executor(threads)
    threads.submit(is_done.wait)
    try:
        yield
    finally:
        is_done.set()


async def until(condition) -> None:
    """Wait for what another task is about to do."""
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition never came true")
