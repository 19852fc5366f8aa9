"""Reading a request's JSON body, within its limit, and what is left of one that was refused.

The limit holds while the bytes arrive, whatever the Content-Length header says or does not say. Knows nothing of what
the body means: that is `protocol`'s.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message, Receive, Scope

from penstock.connection_limits import ConnectionLimits
from penstock.errors import BodyTooLarge
from penstock.protocol.media_type import check_json
from penstock.protocol.wire import MAX_ENTRIES, WireModel, parse_request
from penstock.server.claim import Claim
from penstock.server.endpoint import caller_of
from penstock.server.text_work import TextWork

_LARGE_BODY_BYTES = 256 * 1024  # from here on a thread reads it, so that others' streams go on meanwhile
_MAX_DISCARDED_BYTES = ConnectionLimits().max_discarded_bytes
_DISCARD_SECONDS = ConnectionLimits().discard_seconds

Wanted = TypeVar("Wanted", bound=WireModel)


class UnreadBody:
    """A request's body as far as nobody has read it: `receive` for the app, `discard` for what the app leaves."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        headers = Headers(scope=scope)
        # Who waits for our word before he sends a body need not be read to its end.
        self._is_left = has_body(headers) and "expect" not in headers
        self._receive = receive

    async def receive(self) -> Message:
        message = await self._receive()
        self._is_left = self._is_left and bool(message.get("more_body"))
        return message

    async def discard(self) -> None:
        """Read what is left, within bounds: a connection closed over unread bytes is reset, and our answer lost."""
        num_bytes = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_SECONDS):
                while self._is_left and num_bytes < _MAX_DISCARDED_BYTES:
                    num_bytes += len((await self.receive()).get("body", b""))


def has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


async def read_request(
    request: Request,
    kind: type[Wanted],
    max_bytes: int,
    texts: TextWork,
    check: Callable[[], Awaitable[None]] | None = None,
    *,
    max_entries: int = MAX_ENTRIES,
) -> Wanted:
    """Return the checked body; none at all is as good as an empty object. Raises RequestError, or as `check` does.

    A large body is only parsed where `check` does not raise. `max_entries` is what `parse_request` takes.
    """
    if not kind.has_required_fields() and not has_body(request.headers):
        return kind()
    check_json(request.headers)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise BodyTooLarge(max_bytes, int(declared))
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise BodyTooLarge(max_bytes)
    if len(body) > _LARGE_BODY_BYTES:
        if check is not None:
            await check()
        claim = Claim(caller_of(request).tenant)
        parse = partial(parse_request, kind, bytes(body), max_entries=max_entries)
        return await texts.run(claim, len(body), parse)
    return parse_request(kind, bytes(body), max_entries=max_entries)
