"""One connection of a caller, with limits on what a slow, silent or greedy one may hold.

aiohttp parses and writes; this stands between it and the transport and adds what it lacks: clocks for a request's head
and for a reader that falls behind, a size for the head, errors of the catalogue for what is no request, and a most
number of connections, of which idle ones make room for new ones. The body's clock is `read_body`'s. Knows nothing of
routes or requests' meaning.
"""

import asyncio
import enum
import logging
import socket
from http import HTTPStatus
from typing import cast

from aiohttp import HttpVersion11, StreamReader, web

from penstock.connection_limits import ConnectionLimits, Crowd, Cut
from penstock.errors import BodyTooLarge, HeadTooLarge, Overloaded, PenstockError, RequestError, RequestTimeout
from penstock.protocol.errors import reply_for

_END_OF_HEAD = b"\r\n\r\n"
_BACKLOG = 1024
_MAX_HEADERS = 1024  # within the size of a head
# Responses are mappings as well, and to ask of what kind one is takes long.
_USUAL_RESPONSES = frozenset({web.StreamResponse, web.Response})

log = logging.getLogger("penstock.gateway")


class _Reading(enum.Enum):
    """Where a connection is."""

    NOTHING = enum.auto()  # idle
    HEAD = enum.auto()
    REQUEST = enum.auto()  # its head has come; it is read further and answered, or what is left of it thrown away


class GuardedConnection(asyncio.Protocol):
    """aiohttp's connection, under `ConnectionLimits`."""

    def __init__(self, inner: "_Handler", connections: "Connections") -> None:
        self._inner = inner
        self._connections = connections
        self._limits = connections.limits
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._is_refused = False
        self._reading = _Reading.NOTHING
        self._head_bytes = 0
        self._tail = b""  # of the head, in which its end may have begun
        self._other_bytes = 0  # that came since the last of a request's body: its trailers, and what is sent ahead
        self._discarded_bytes: int | None = None  # of a body whose request is answered
        self._clock: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self.own_address: str | None = None  # that it came to; None: a Unix socket

    # ------------------------------------------------------------ the connection's life

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        transport.set_write_buffer_limits(self._limits.unread_bytes)
        address = transport.get_extra_info("sockname")
        self.own_address = str(address[0]) if isinstance(address, tuple) else None
        plain = transport.get_extra_info("socket")
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._limits.socket_bytes)
        self._is_refused = not self._connections.enter(self, transport)
        if self._is_refused:
            self._refuse(Overloaded("too many connections are open; try again in a moment", retry_after_seconds=1.0))
            return
        self._inner.connection_made(transport)
        self._allow(self._limits.idle_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        assert self._transport is not None
        self._connections.exit(self, self._transport)
        for timer in (self._clock, self._stall):
            if timer is not None:
                timer.cancel()
        if not self._is_refused:
            self._inner.connection_lost(exc)

    def leave(self) -> None:
        """Close: at once if the client does not read, else behind what it still has to read."""
        assert self._transport is not None
        self._transport.close()
        if self._stall is None:
            self._stall = self._loop.call_later(self._limits.reader_seconds, self._cut, Cut.READER)

    def on_answered(self) -> None:
        """A request has been answered: what comes next begins another."""
        if self._reading is _Reading.REQUEST:
            self._reading = _Reading.NOTHING
            self._other_bytes, self._discarded_bytes = 0, None
            self._connections.crowd.note_idle(self)

    def on_answered_early(self) -> None:
        """A request has been answered before its body came: what still comes is thrown away, within bounds."""
        self._discarded_bytes = 0

    # ------------------------------------------------------------ reading

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._reading is _Reading.REQUEST:
            self._take_rest(data)
            return
        begins = self._reading is _Reading.NOTHING and bool(data.lstrip(b"\r\n"))  # empty lines begin no request
        if begins:
            self._reading = _Reading.HEAD
            self._head_bytes, self._tail = 0, b""
        if self._reading is _Reading.HEAD and not self._take_head(data):
            self._connections.crowd.on_cut(Cut.HEAD)
            self._refuse(HeadTooLarge(self._limits.max_head_bytes))
            return
        if begins and self._reading is _Reading.HEAD:  # nearly always it comes whole, and needs no clock
            self._allow(self._limits.head_seconds)
        self._inner.data_received(data)

    def _take_rest(self, data: bytes) -> None:
        """Take what comes behind a head. Of what is no body of its request, no more than a head may be large."""
        if self._discarded_bytes is not None:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > self._limits.max_discarded_bytes:
                self.leave()
                return
        before = self._inner.body
        num_before = before.total_bytes if before is not None else 0
        self._inner.data_received(data)
        if before is None:
            return
        self._other_bytes = self._other_bytes + len(data) if before.total_bytes == num_before else 0
        if self._other_bytes > self._limits.max_head_bytes:
            self._cut(Cut.PIPELINE if before.is_eof() else Cut.HEAD)

    def eof_received(self) -> None:
        if not self._is_refused:
            self._inner.eof_received()

    def _take_head(self, data: bytes) -> bool:
        """Look for the head's end; False where it is too large."""
        seen = self._tail + data
        end = seen.find(_END_OF_HEAD)
        self._head_bytes += len(data) if end < 0 else max(0, end - len(self._tail))
        self._tail = seen[-(len(_END_OF_HEAD) - 1) :]
        if end >= 0:
            self._reading = _Reading.REQUEST
            self._connections.crowd.note_busy(self)
            self._forget_clock()
        return self._head_bytes <= self._limits.max_head_bytes

    # ------------------------------------------------------------ writing

    def pause_writing(self) -> None:
        self._inner.pause_writing()
        if self._stall is None:
            self._stall = self._loop.call_later(self._limits.reader_seconds, self._cut, Cut.READER)

    def resume_writing(self) -> None:
        self._inner.resume_writing()
        assert self._transport is not None
        if self._stall is not None and not self._transport.is_closing():
            self._stall.cancel()
            self._stall = None

    # ------------------------------------------------------------ limits

    def _allow(self, seconds: float) -> None:
        """Give what is being waited for so long."""
        self._forget_clock()
        self._clock = self._loop.call_later(seconds, self._run_out)

    def _forget_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _run_out(self) -> None:
        if self._reading is _Reading.HEAD:
            self._connections.crowd.on_cut(Cut.HEAD)
            self._refuse(RequestTimeout("the request did not arrive in time; send it without pauses"))
        elif self._reading is _Reading.NOTHING:
            self.leave()

    def _refuse(self, error: PenstockError) -> None:
        """Say why, before any response has begun, and close."""
        assert self._transport is not None
        self._transport.write(_last_answer(error))
        self.leave()

    def _cut(self, why: Cut) -> None:
        """End the connection now, whatever the client has not read."""
        assert self._transport is not None
        self._connections.crowd.on_cut(why)
        self._transport.abort()


class _Handler(web.RequestHandler):
    """aiohttp's part of a connection. Where it answers by itself, so as everything else here does."""

    __slots__ = ()

    @property
    def body(self) -> StreamReader | None:
        """The body of the request that is being answered, as far as it came; None: none is."""
        return self._current_request.content if self._current_request is not None else None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status < 500:
            return Refusal(RequestError("this is no HTTP request that could be understood"))
        log.error("unexpected failure of a connection", exc_info=exc)
        return Refusal(PenstockError())

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if type(resp) in _USUAL_RESPONSES:
            return await super().finish_response(request, resp, start_time)
        if isinstance(resp, web.HTTPException):  # raised before any of our code was asked
            resp = Refusal(RequestError("the request could not be understood"))
        if not isinstance(resp, Refusal):
            return await super().finish_response(request, resp, start_time)
        if self.transport is not None and request.writer.output_size == 0:  # else an answer has begun
            self.transport.write(_last_answer(resp.error))
        return resp, True  # closes the connection


class Refusal(web.StreamResponse):
    """What is answered without the framework, which would tell its name and version. Ends the connection."""

    def __init__(self, error: PenstockError) -> None:
        super().__init__(status=reply_for(error).status)
        self.error = error


def _last_answer(error: PenstockError) -> bytes:
    """Return an error behind which the connection is closed, as it stands on the wire."""
    reply = reply_for(error)
    fixed = {"content-type": "application/json", "content-length": str(len(reply.body)), "connection": "close"}
    head = f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in {**fixed, **reply.headers}.items())
    return head.encode() + b"\r\n" + reply.body


class Connections:
    """All connections of a gateway, whichever of its ports they came to."""

    def __init__(self, crowd: Crowd) -> None:
        self.crowd = crowd
        self.limits: ConnectionLimits = crowd.limits
        self._open: dict[asyncio.BaseTransport, GuardedConnection] = {}

    def enter(self, connection: GuardedConnection, transport: asyncio.BaseTransport) -> bool:
        """Take a new connection in; False if there is no room."""
        self._open[transport] = connection
        return self.crowd.enter(connection)

    def exit(self, connection: GuardedConnection, transport: asyncio.BaseTransport) -> None:
        self._open.pop(transport, None)
        self.crowd.exit(connection)

    def cut_all(self) -> None:
        for transport in list(self._open):
            cast(asyncio.Transport, transport).abort()

    def own_address(self, transport: asyncio.BaseTransport | None) -> str | None:
        """Return the address that a connection came to; None: a Unix socket, or the connection is gone."""
        connection = self._open.get(transport) if transport is not None else None
        return connection.own_address if connection is not None else None

    def note_answered(self, transport: asyncio.BaseTransport | None, *, is_read: bool) -> None:
        """Take that a request has been answered, be it before all of it was read, once what it wrote is on its way."""
        connection = self._open.get(transport) if transport is not None else None
        if connection is not None:
            step = connection.on_answered if is_read else connection.on_answered_early
            asyncio.get_running_loop().call_soon(step)


class GuardedSite(web.BaseSite):
    """A listening socket whose connections are guarded."""

    def __init__(self, runner: web.AppRunner, listener: socket.socket, connections: Connections) -> None:
        super().__init__(runner, backlog=_BACKLOG)
        self._listener = listener
        self._connections = connections

    @property
    def name(self) -> str:
        return str(self._listener.getsockname())

    async def start(self) -> None:
        await super().start()
        server, limits = self._runner.server, self._connections.limits
        assert server is not None
        loop = asyncio.get_running_loop()

        def connect() -> GuardedConnection:
            inner = _Handler(
                server, loop=loop, keepalive_timeout=limits.idle_seconds, access_log=None,  # type: ignore[arg-type]
                max_line_size=limits.max_head_bytes, max_field_size=limits.max_head_bytes, max_headers=_MAX_HEADERS,
                lingering_time=limits.discard_seconds,
                auto_decompress=False,  # such a body is refused, and what is left of it thrown away as it came
            )  # fmt: skip
            return GuardedConnection(inner, self._connections)

        factory = loop.create_unix_server if self._listener.family == socket.AF_UNIX else loop.create_server
        self._server = await factory(connect, sock=self._listener, backlog=self._backlog)


async def read_body(request: web.Request, max_bytes: int, connections: Connections) -> bytes:
    """Return a request's body. Raises BodyTooLarge, or RequestTimeout for one that comes too slowly."""
    content = request.content
    # Nearly always it has come with its head.
    data = content.read_nowait()
    pieces, size, is_whole = [data], len(data), content.at_eof()
    if not is_whole and (request.content_length or 0) > max_bytes:
        raise BodyTooLarge(max_bytes, request.content_length)
    clock = None if is_whole else BodyClock(request, connections)
    try:
        while clock is not None and (data := await clock.next()):
            size += len(data)
            if size > max_bytes:
                break
            pieces.append(data)
    except TimeoutError:
        raise RequestTimeout("the request did not arrive in time; send it without pauses") from None
    if size > max_bytes:
        raise BodyTooLarge(max_bytes)
    return b"".join(pieces)


class BodyClock:
    """Gives a body as it comes, which may take some seconds, and more for what has arrived."""

    def __init__(self, request: web.Request, connections: Connections) -> None:
        self._request = request
        self._connections = connections
        self._deadline = asyncio.get_running_loop().time() + connections.limits.body_seconds
        self._is_awaited = request.headers.get("expect", "").lower() == "100-continue"

    async def next(self) -> bytes:
        """Return what comes next; nothing at the end. Raises TimeoutError."""
        if self._is_awaited and self._request.version >= HttpVersion11:
            await self._request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._is_awaited = False
        try:
            async with asyncio.timeout_at(self._deadline):
                data = await self._request.content.readany()
        except TimeoutError:
            self._connections.crowd.on_cut(Cut.BODY)
            raise
        self._deadline += len(data) / self._connections.limits.body_bytes_per_second
        return data


async def leave_to_reader(request: web.Request) -> None:
    """Who asks whether to send a body gets his answer from whoever reads it: `read_body`, or a refusal."""
