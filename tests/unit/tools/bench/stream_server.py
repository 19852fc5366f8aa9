"""A server of OpenAI's streaming API that does what a script says, at the times it says."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Script:
    """How every request is answered."""

    first_seconds: float = 0.05
    token_seconds: float = 0.01
    status: int = 200
    refuses_probe: bool = False  # with the status too
    refusal: bytes = b'{"error": {"message": "too many"}}'  # where the status is another
    cut_after: int | None = None  # tokens, then the connection breaks
    end_after: int | None = None  # tokens, then the stream ends as if it were whole, without [DONE]
    error_after: int | None = None  # tokens, then an error event
    usage: bool = True
    cached_tokens: int = 0
    silent_after: int | None = None  # answers, then no request gets any
    refuses: tuple[str, ...] = ()  # fields that get a 400
    takes_token_ids: bool = True
    tokens_per_event: int = 1
    content_type: str = "text/event-stream"
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    num_open: int = 0
    max_open: int = 0


@asynccontextmanager
async def served(script: Script) -> AsyncIterator[str]:
    """Serve the script on the running loop; yield the server's URL."""
    app = web.Application(client_max_size=64 * 1024 * 1024)
    server = _Server(script)
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.completion)
    app.router.add_post("/v1/chat/completions", server.completion)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


class _Server:
    def __init__(self, script: Script) -> None:
        self._script = script

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted"}, {"id": "other"}]})

    async def completion(self, request: web.Request) -> web.StreamResponse:
        script = self._script
        body = await request.json()
        script.requests.append(body)
        script.keys.append(request.headers.get("Authorization"))
        if any(name in body for name in script.refuses) or not (
            script.takes_token_ids or isinstance(body.get("prompt", ""), str)
        ):
            return web.json_response({"error": {"message": "what is this?"}}, status=400)
        # The probe, which asks for one token, is let through: most scripts are about what comes after it.
        if script.status != 200 and (script.refuses_probe or body["max_tokens"] > 1):
            return web.Response(body=script.refusal, status=script.status, content_type="application/json")
        script.num_open += 1
        script.max_open = max(script.max_open, script.num_open)
        try:
            return await self._stream(request, body)
        finally:
            script.num_open -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        script = self._script
        chat = "messages" in body
        if script.silent_after is not None and len(script.requests) > script.silent_after:
            await asyncio.Event().wait()
        response = web.StreamResponse(headers={"Content-Type": script.content_type})
        await asyncio.sleep(script.first_seconds)
        await response.prepare(request)
        if chat:
            await response.write(_event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
        for index in range(0, body["max_tokens"], script.tokens_per_event):
            if index:
                await asyncio.sleep(script.token_seconds * script.tokens_per_event)
            if script.cut_after == index and request.transport is not None:
                request.transport.abort()
                return response
            if script.end_after == index:
                return response
            if script.error_after == index:
                await response.write(_event({"error": {"message": "the engine failed"}}))
                return response
            last = index + script.tokens_per_event >= body["max_tokens"]
            choice = {"delta": {"content": "w"}} if chat else {"index": 0, "text": "w", "logprobs": None}
            await response.write(_event({"choices": [{**choice, "finish_reason": "length" if last else None}]}))
        if script.usage and "stream_options" in body:
            prompt = body.get("prompt", "")
            usage = {
                "prompt_tokens": len(prompt if isinstance(prompt, list) else prompt.split()),
                "completion_tokens": body["max_tokens"],
                "prompt_tokens_details": {"cached_tokens": script.cached_tokens},
            }
            await response.write(_event({"choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        return response


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"
