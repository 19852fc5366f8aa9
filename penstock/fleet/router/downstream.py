"""The caller's end of a stream: written to as fast as the caller reads.

A caller who reads slowly slows down its own replica stream only, and that stream's end is then not held against the
replica. Who stops reading is cut by its connection's limits. Knows nothing of what is streamed.
"""

import time

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

_SLOW_SECONDS = 1.0
_EVENTS = "text/event-stream"


class ClientGone(Exception):
    """The caller closed the connection."""


class Downstream:
    """One streamed response."""

    def __init__(self, request: web.Request, response: web.StreamResponse, writer: AbstractStreamWriter) -> None:
        """`writer` is what the response, whose head was sent, writes to."""
        self.response = response
        self.was_slow = False  # the caller once took long to read
        self._request = request
        self._writer = writer
        self._held = b""

    async def write(self, data: bytes) -> None:
        """Send what there is; returns when there is room for more. Raises ClientGone."""
        began = time.monotonic()
        try:
            await self._writer.write(data)
        except ConnectionError:
            raise ClientGone from None
        self.was_slow = self.was_slow or time.monotonic() - began > _SLOW_SECONDS

    def hold(self, data: bytes) -> None:
        """Have what comes last leave together with the end."""
        self._held += data

    async def end(self) -> None:
        held, self._held = self._held, b""
        try:
            await self.response.write_eof(held)
        except ConnectionError:
            raise ClientGone from None

    async def fail(self, error: bytes) -> None:
        """End what cannot go on: with an error's document as its last event, or, where it has no events, cut off."""
        if self.response.content_type != _EVENTS:
            self.cut()
            return
        self.hold(b"\n\ndata: %b\n\n" % error)  # the line breaks end an event that broke off
        await self.end()

    def cut(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()


BEGUN = web.RequestKey("begun", Downstream)  # what a request's answer has begun with: no other may follow


async def begin_stream(request: web.Request, response: web.StreamResponse) -> Downstream:
    """Send a response's head. Raises ClientGone."""
    if not request.content.is_eof():
        response.force_close()  # the rest of the request would stand before the next
    try:
        writer = await response.prepare(request)
    except ConnectionError:
        raise ClientGone from None
    assert writer is not None  # None: the response was ended before
    downstream = request[BEGUN] = Downstream(request, response, writer)
    return downstream
