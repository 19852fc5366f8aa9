"""One HTTP connection, with limits on what a slow, silent or greedy client may hold.

uvicorn parses and writes; this adds what it lacks: clocks for a request's head and body and for a reader that falls
behind, a size for the head, a most number of connections, of which idle ones make room for new ones, bodies of requests
that offer another protocol, and answers that HTTP/1.0 clients can read. Knows nothing of routes or requests' meaning.
"""

import asyncio
import enum
import functools
import socket
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from penstock.connection_limits import ConnectionLimits, Crowd, Cut
from penstock.errors import HeadTooLarge, Overloaded, PenstockError, RequestError, RequestTimeout
from penstock.protocol.errors import reply_for
from penstock.server.metrics import ServerMetrics

# A refused client may still be sending, and whoever closes on that makes it lose the answer: for so long, and so many
# bytes, what comes is read and thrown away.
_FAREWELL_SECONDS = 1.0
_FAREWELL_BYTES = 16 * 1024 * 1024


class _Reading(enum.Enum):
    """Which part of a request is expected or arriving."""

    NOTHING = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()
    FAREWELL = enum.auto()  # what is sent to who has been refused


class GuardedConnection(HttpToolsProtocol):
    """uvicorn's connection, under `ConnectionLimits`."""

    def __init__(self, *, crowd: Crowd, **given: Any) -> None:
        super().__init__(**given)
        self.parser = _Parser(self)
        self._crowd = crowd
        self._limits = crowd.limits
        self._answering: RequestResponseCycle | None = None
        self._reading = _Reading.NOTHING
        self._head_bytes = 0  # of reads that did not end the head, or were no body behind it
        self._line_bytes = 0  # of the head's lines that are whole
        self._body_came = False
        self._farewell_bytes = 0
        self._deadline: float | None = None  # for what is being read
        self._clock: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------ the connection's life

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(self._limits.unread_bytes)
        plain = transport.get_extra_info("socket")
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._limits.socket_bytes)
        if self._crowd.enter(self):
            self._allow(self._limits.idle_seconds)
        else:
            self._answer(Overloaded("too many connections are open; try again in a moment", retry_after_seconds=1.0))
            self.leave()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # uvicorn tells the newest request only; the one being answered may have others waiting behind it.
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        self._crowd.exit(self)
        for timer in (self._clock, self._stall):
            if timer is not None:
                timer.cancel()
        self._clock = self._stall = None

    def leave(self) -> None:
        """Close: at once if the client does not read, else behind what it still has to read."""
        self.transport.close()
        if self._stall is None:
            self._stall = self.loop.call_later(self._limits.reader_seconds, self._cut, Cut.READER)

    def timeout_keep_alive_handler(self) -> None:
        self.leave()

    # ------------------------------------------------------------ reading

    def data_received(self, data: bytes) -> None:
        if self._reading is _Reading.FAREWELL:
            self._farewell_bytes += len(data)
            if self._farewell_bytes > _FAREWELL_BYTES:
                self.leave()
            return
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._reading is _Reading.HEAD:
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.max_head_bytes:
                self._refuse_head()
        elif self._reading is _Reading.BODY and self._deadline is not None:
            self._deadline += len(data) / self._limits.body_bytes_per_second
            # Behind the body may come trailers, which have the limits of a head.
            self._head_bytes = 0 if self._body_came else self._head_bytes + len(data)
            self._body_came = False
            if self._head_bytes > self._limits.max_head_bytes:
                self._refuse_head()
        elif self._is_idle and self.timeout_keep_alive_task is None:
            self._allow(self._limits.idle_seconds)  # empty lines, which begin no request

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= self._limits.max_pipelined:
            self._cut(Cut.PIPELINE)
            raise ConnectionAbortedError  # ends the parser's work on what has arrived
        super().on_message_begin()
        self._reading = _Reading.HEAD
        self._head_bytes = self._line_bytes = 0
        self._deadline = None
        self._allow(self._limits.head_seconds)

    def on_url(self, url: bytes) -> None:
        self._count_line(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_line(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.offers_upgrade:
            return  # it comes again, without the offer
        self._crowd.note_busy(self)
        self._reading = _Reading.BODY
        self._head_bytes = 0
        self._deadline = None
        self._allow(self._limits.body_seconds)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_came = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.offers_upgrade:
            return
        self._reading = _Reading.NOTHING
        self._deadline = None
        super().on_message_complete()

    @property
    def offers_upgrade(self) -> bool:
        """Whether the request whose head has come offers to go on in another protocol."""
        return self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)

    def head_without_offer(self) -> bytes:
        """Return the head that has come, as if it offered nothing."""
        first = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        kept = [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([first, *kept, b"", b""])

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, functools.partial(_speak_http_1_0, cycle, app) if _is_old(cycle) else app)

    def send_400_response(self, msg: str) -> None:
        if self._reading is not _Reading.FAREWELL and not self.transport.is_closing():
            self._refuse(RequestError("this is no HTTP request that could be understood"))

    # ------------------------------------------------------------ writing

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self._limits.reader_seconds, self._cut, Cut.READER)

    def resume_writing(self) -> None:
        super().resume_writing()
        is_over = self._reading is _Reading.FAREWELL or self.transport.is_closing()
        if self._stall is not None and not is_over:
            self._stall.cancel()
            self._stall = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self.leave()
        elif self._is_idle:
            self._crowd.note_idle(self)

    # ------------------------------------------------------------ limits

    @property
    def _is_idle(self) -> bool:
        responding = self._answering is not None and not self._answering.response_complete
        return self._reading is _Reading.NOTHING and not responding and not self.pipeline

    def _allow(self, seconds: float) -> None:
        """Give what is being read so long, unless it already has a deadline."""
        if self._deadline is None:
            self._deadline = self.loop.time() + seconds
        if self._clock is None:
            self._clock = self.loop.call_at(self._deadline, self._look_at_clock)
        elif self._clock.when() > self._deadline:
            self._clock.cancel()
            self._clock = self.loop.call_at(self._deadline, self._look_at_clock)

    def _look_at_clock(self) -> None:
        self._clock = None
        if self._deadline is None or self.transport.is_closing():
            return
        if self.loop.time() < self._deadline:
            self._clock = self.loop.call_at(self._deadline, self._look_at_clock)
        elif self._reading is _Reading.NOTHING:
            self.leave()
        else:
            self._crowd.on_cut(Cut.HEAD if self._reading is _Reading.HEAD else Cut.BODY)
            self._refuse(RequestTimeout("the request did not arrive in time; send it without pauses"))

    def _count_line(self, num_bytes: int) -> None:
        self._line_bytes += num_bytes
        if self._line_bytes > self._limits.max_head_bytes:
            self._refuse_head()
            raise ConnectionAbortedError  # ends the parser's work on what has arrived

    def _refuse_head(self) -> None:
        self._crowd.on_cut(Cut.HEAD)
        self._refuse(HeadTooLarge(self._limits.max_head_bytes))

    def _refuse(self, error: PenstockError) -> None:
        """Say why where no response has begun, and close when the client has had the time to hear it."""
        self._answer(error)
        self._reading, self._deadline = _Reading.FAREWELL, None
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()
            self._stall = self._stall or self.loop.call_later(_FAREWELL_SECONDS, self.transport.abort)
        else:
            self.leave()

    def _answer(self, error: PenstockError) -> None:
        if self._answering is None or self._answering.response_complete or not self._answering.response_started:
            reply = reply_for(error)
            fixed = {"content-type": "application/json", "content-length": str(len(reply.body)), "connection": "close"}
            head = "".join(f"{name}: {value}\r\n" for name, value in {**fixed, **reply.headers}.items())
            self.transport.write(STATUS_LINE[reply.status] + head.encode() + b"\r\n" + reply.body)

    def _cut(self, why: Cut) -> None:
        """End the connection now, whatever the client has not read."""
        self._crowd.on_cut(why)
        self.transport.abort()


class _Parser(httptools.HttpRequestParser):
    """Reads a request that offers another protocol as if it did not: some clients do so with every first request.

    The library takes whatever follows such a head for the other protocol's, and the body would be lost.
    """

    def __init__(self, connection: GuardedConnection) -> None:
        super().__init__(connection)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._connection = connection

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]
        parser, connection = self, self._connection
        while True:
            try:
                super(_Parser, parser).feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                if not connection.offers_upgrade:
                    raise  # CONNECT
                data = connection.head_without_offer() + data[offer.args[0] :]
                parser = connection.parser = _Parser(connection)  # it reads nothing behind `Connection: close`


def _is_old(cycle: RequestResponseCycle) -> bool:
    return cycle.scope["http_version"] == "1.0"


async def _speak_http_1_0(cycle: RequestResponseCycle, app: Any, scope: Any, receive: Any, send: Any) -> None:
    """Run the app for one that knows neither chunks nor 100 Continue: what has no length ends with the connection."""
    cycle.waiting_for_100_continue = False
    has_length = True

    async def send_plainly(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:
            cycle.expected_content_length += len(message.get("body", b""))  # of which uvicorn takes it off again
        await send(message)

    await app(scope, receive, send_plainly)


def connection_class(limits: ConnectionLimits, metrics: ServerMetrics) -> Any:
    """Return what uvicorn makes a worker's connections with."""
    return functools.partial(GuardedConnection, crowd=Crowd(limits, metrics.count_cut))
