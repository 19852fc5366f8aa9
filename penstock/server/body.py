"""Reading a request's JSON body, within its limit.

The limit holds while the bytes arrive, whatever the Content-Length header says or does not say. Knows nothing of what
the body means: that is `protocol`'s.
"""

import asyncio
from typing import TypeVar

from starlette.requests import Request

from penstock.errors import BodyTooLarge, WrongMediaType
from penstock.protocol.wire import WireModel, parse_request

_LARGE_BODY_BYTES = 256 * 1024  # from here on a thread reads it, so that others' streams go on meanwhile

Wanted = TypeVar("Wanted", bound=WireModel)


async def read_request(request: Request, kind: type[Wanted], max_bytes: int) -> Wanted:
    """Return the checked body. Raises RequestError."""
    # A web page may send other types to any local server without asking; JSON it may not.
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise WrongMediaType("send the body as JSON, with the header 'Content-Type: application/json'")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise BodyTooLarge(max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise BodyTooLarge(max_bytes)
    if len(body) > _LARGE_BODY_BYTES:
        return await asyncio.to_thread(parse_request, kind, bytes(body))
    return parse_request(kind, bytes(body))
