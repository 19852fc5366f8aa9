"""A small server that speaks the part of OpenAI's API that `penstock chat` uses, from a script."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class ChatScript:
    """What the server answers, and what it was asked."""

    pieces: list[str] = field(default_factory=lambda: ["Hel", "lo"])
    raw: list[bytes] | None = None  # sent as they are, instead of the pieces
    status: int = 200
    error: dict[str, Any] | None = None  # the body, where the status is not 200
    models: list[str] | None = field(default_factory=lambda: ["tiny"])  # None: the server lists none, with 404
    max_context_tokens: int | None = None  # None: the server does not tell
    hang_after_pieces: bool = False
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    hung_up: threading.Event = field(default_factory=threading.Event)  # the client left while an answer hung


@contextmanager
def serve_chat(script: ChatScript) -> Iterator[str]:
    """Serve the script from a thread of its own; yield the server's URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(_app(script), handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _app(script: ChatScript) -> web.Application:
    def describe(name: str) -> dict[str, object]:
        known = {} if script.max_context_tokens is None else {"max_context_tokens": script.max_context_tokens}
        return {"id": name, **known}

    async def models(request: web.Request) -> web.Response:
        script.keys.append(request.headers.get("Authorization"))
        if script.models is None:
            raise web.HTTPNotFound
        return web.json_response({"object": "list", "data": [describe(name) for name in script.models]})

    async def chat(request: web.Request) -> web.StreamResponse:
        script.requests.append(await request.json())
        if script.status != 200:
            return web.json_response(script.error, status=script.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in script.raw if script.raw is not None else _events(script):
            await response.write(chunk)
        if script.hang_after_pieces:
            try:
                await asyncio.sleep(60)
            finally:
                script.hung_up.set()
        return response

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", chat)
    return app


def _events(script: ChatScript) -> list[bytes]:
    pieces: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
    pieces += [{"choices": [{"delta": {"content": piece}}]} for piece in script.pieces]
    if script.hang_after_pieces:
        return [_event(piece) for piece in pieces]
    pieces.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    pieces.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(script.pieces)}})
    return [*map(_event, pieces), b"data: [DONE]\n\n"]


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"
