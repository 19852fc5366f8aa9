"""The caller's end of a stream: written to as fast as the caller reads, and cut when it stops reading.

A caller who reads slowly slows down its own replica stream only, and that stream's end is then not held against the
replica. Knows nothing of what is streamed.
"""

import asyncio
import time

from aiohttp import web

MAX_STALL_SECONDS = 30.0
_SLOW_SECONDS = 1.0


class ClientGone(Exception):
    """The caller closed the connection."""


class Downstream:
    """One streamed response."""

    def __init__(self, request: web.Request, response: web.StreamResponse) -> None:
        self.response = response
        self.was_slow = False  # the caller once took long to read
        self.blocked_since: float | None = None
        self._request = request

    async def write(self, data: bytes) -> None:
        """Send what there is; returns when there is room for more. Raises ClientGone."""
        began = self.blocked_since = time.monotonic()
        try:
            await self.response.write(data)
        except ConnectionError:
            raise ClientGone from None
        self.blocked_since = None
        self.was_slow = self.was_slow or time.monotonic() - began > _SLOW_SECONDS

    async def end(self) -> None:
        try:
            await self.response.write_eof()
        except ConnectionError:
            raise ClientGone from None

    def cut(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()


class StalledReaders:
    """All open streams: looks now and then whether somebody has stopped reading."""

    def __init__(self, max_seconds: float = MAX_STALL_SECONDS) -> None:
        self._max_seconds = max_seconds
        self._open: set[Downstream] = set()

    async def begin(self, request: web.Request, response: web.StreamResponse) -> Downstream:
        """Send a response's head. Forget the stream when it has ended. Raises ClientGone."""
        try:
            await response.prepare(request)
        except ConnectionError:
            raise ClientGone from None
        downstream = Downstream(request, response)
        self._open.add(downstream)
        return downstream

    def forget(self, downstream: Downstream) -> None:
        self._open.discard(downstream)

    def cut_stalled(self) -> None:
        latest = time.monotonic() - self._max_seconds
        for downstream in self._open:
            if downstream.blocked_since is not None and downstream.blocked_since < latest:
                downstream.cut()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._max_seconds / 10)
            self.cut_stalled()
