"""Requests to replicas over kept connections: HTTP/1.1 as far as a token's way needs it, and no further.

Sends one request, gives the head of its answer and then the body as it comes, never far ahead of whoever reads it.
httptools parses. What a general client does besides (cookies, redirects, a task for each request, a timer for each
read) took longer than all else on the way to a first byte. Knows nothing of routing, retries or callers.
"""

import asyncio
import functools
import math
import select
import ssl
from collections.abc import Mapping
from types import TracebackType
from typing import Self, cast
from urllib.parse import urlsplit

import httptools
from multidict import MultiDict

from penstock.connection_limits import ConnectionLimits
from penstock.fleet.config import HealthSection

_MAX_HEAD_BYTES = 64 * 1024
_MAX_UNREAD_BYTES = 128 * 1024
_STATUSES = range(100, 600)
_NUM_OWN_LINES = 5  # of a request's head: those that are not given headers


class ReplicaLost(ConnectionError):
    """A replica closed a connection before it had answered, or sent what is no answer."""


class _GivenUp(ReplicaLost):
    """A replica closed a connection without a byte of an answer."""


class ReplicaUnreachable(ConnectionError):
    """No connection to a replica could be made."""


class Answer:
    """What a replica answers. Who leaves it before its end cuts the connection: the replica need not go on with it."""

    __slots__ = (
        "_bytes_per_second", "_connection", "_failure", "_has_ended", "_seconds_left", "_unread", "_waiter",
        "headers", "num_unread_bytes", "status",
    )  # fmt: skip

    def __init__(self, connection: "_Connection", limits: ConnectionLimits) -> None:
        self.status = 0  # until its head has come
        self.headers: MultiDict[str] = MultiDict()  # by names in lower case, as often as they came
        self.num_unread_bytes = 0
        self._seconds_left = limits.body_seconds  # to wait for a body that is no stream
        self._bytes_per_second = limits.body_bytes_per_second
        self._unread: list[bytes] = []
        self._connection: _Connection | None = connection  # None: nothing more will come
        self._has_ended = False  # as it should
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def media_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def is_encoded(self) -> bool:
        """Whether it is compressed, though nobody asked for that."""
        return self.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity")

    @property
    def ends_with_connection(self) -> bool:
        """Whether nothing but the connection's end tells that it is whole (RFC 9112, 6.3)."""
        return bool(self.status) and not ("content-length" in self.headers or "chunked" in self.transfer_codings)

    @property
    def transfer_codings(self) -> list[str]:
        """What was done to the body for its way, `identity` left out: nothing was."""
        lines = ",".join(self.headers.getall("transfer-encoding", ()))
        return [coding for item in lines.split(",") if (coding := item.strip().lower()) not in ("", "identity")]

    @property
    def num_declared_bytes(self) -> int | None:
        """How large its body is, where it says so."""
        declared = self.headers.get("content-length")
        return int(declared) if declared is not None else None  # a number, or the parser had refused it

    @property
    def is_read(self) -> bool:
        """Whether all of it came and was read."""
        return self._has_ended and not self._unread

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def await_head(self) -> None:
        """Return when status and headers are known. Raises ReplicaLost, TimeoutError."""
        while not self.status:
            await self._wait()

    async def read_any(self) -> bytes:
        """Return what has come, as soon as there is anything; nothing at the end. Raises ReplicaLost, TimeoutError."""
        while not self._unread:
            if self._has_ended:
                return b""
            await self._wait()
        data = self._unread[0] if len(self._unread) == 1 else b"".join(self._unread)
        self._unread.clear()
        self.num_unread_bytes = 0
        if self._connection is not None:
            self._connection.resume()
        return data

    async def read_plain(self) -> bytes:
        """As `read_any`, for what is no stream: the wait for all of it is bounded, by more for what has come.

        How long whoever reads it takes in between does not count.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        async with asyncio.timeout(self._seconds_left):
            data = await self.read_any()
        self._seconds_left += len(data) / self._bytes_per_second - (clock() - began)
        return data

    async def read(self, most_bytes: int) -> bytes:
        """Return what is no stream: all of it (`is_read`), or little more than so much of its beginning.

        Raises ReplicaLost, TimeoutError.
        """
        pieces, size = [], 0
        while size <= most_bytes and (data := await self.read_plain()):
            pieces.append(data)
            size += len(data)
        return b"".join(pieces)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.cut()

    def leave(self) -> None:
        """All that matters has come: the connection is kept when the rest, of which nobody wants to know, has too."""
        self._connection = None

    @property
    def is_left(self) -> bool:
        return self._connection is None

    def take(self, data: bytes) -> None:
        """Take bytes of the body in."""
        self._unread.append(data)
        self.num_unread_bytes += len(data)
        self.wake()

    def end(self, failure: Exception | None = None) -> None:
        """Nothing more comes: it is whole, or it broke off."""
        self._connection = None
        self._failure, self._has_ended = failure, failure is None
        self.wake()

    def wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter


class _Connection(asyncio.Protocol):
    """One connection: it has one answer to read, or is idle."""

    def __init__(self, client: "ReplicaClient", url: str, silence_seconds: float, idle_seconds: float) -> None:
        self.url = url
        self._client = client
        self._limits = client.limits
        self._silence_seconds = silence_seconds
        self._idle_seconds = idle_seconds
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._answer: Answer | None = None
        self._is_interim = False  # what is being read tells that the answer is yet to come
        self._is_paused = False
        self._num_head_bytes = 0  # of the answer, as long as its head is not whole
        self._num_other_bytes = 0  # that came since the last of its body: trailers, or what stands between chunks
        self._is_answering = False  # something came since the request was sent
        self._is_in_head = False
        self._head_clock: asyncio.TimerHandle | None = None
        self._heard_at = self._loop.time()
        self.byte_at = -math.inf  # when anything last came, whatever it was

    # ------------------------------------------------------------ for the client

    @property
    def is_fresh(self) -> bool:
        """Whether it can be expected to be open at the other end too."""
        return not self._transport.is_closing() and self._loop.time() - self._heard_at < self._idle_seconds

    @property
    def has_unread_bytes(self) -> bool:
        """Whether something lies there, or the end does: nobody asked for it, and it would be the next answer."""
        readable = select.poll()
        readable.register(self._transport.get_extra_info("socket"), select.POLLIN)
        return bool(readable.poll(0))

    def send(self, head: bytes, body: bytes) -> Answer:
        if self._transport.is_closing():
            raise _GivenUp("the connection was closed before anything was sent")
        answer = self._answer = Answer(self, self._limits)
        self._num_head_bytes = self._num_other_bytes = 0
        self._is_answering = False
        self._heard_at = self._loop.time()
        self._transport.writelines((head, body))
        return answer

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._heard_at = self._loop.time()
            self._transport.resume_reading()

    def cut(self) -> None:
        self._fail(ReplicaLost("the connection was given up"))

    def cut_if_silent(self, seconds: float) -> None:
        """Give up an answer of which nothing has come for so long, unless it is whoever reads that is slow."""
        is_silent = self._loop.time() - self._heard_at >= seconds
        if self._answer is not None and is_silent and not self._is_paused:
            self._fail(TimeoutError("nothing came from the replica, and it answers nobody"))

    def cut_if_unanswered(self) -> None:
        """Give up an answer of which not even the head has come."""
        if self._answer is not None and not self._answer.status:
            self._fail(TimeoutError("nothing came from the replica, and it answers nobody"))

    # ------------------------------------------------------------ asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._timer = self._loop.call_later(self._look_seconds, self._look)
        self._client.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._forget_head_clock()
        self._client.forget(self)
        answer, self._answer = self._answer, None
        if answer is not None:
            is_end = exc is None and answer.ends_with_connection
            lost = ReplicaLost if self._is_answering else _GivenUp
            answer.end(None if is_end else lost("the connection was closed before the answer's end"))

    def data_received(self, data: bytes) -> None:
        self._is_answering = True
        self._num_other_bytes += len(data)
        self.byte_at = self._loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(ReplicaLost("what came is no answer"))
            return
        answer = self._answer
        if answer is None or answer.status:
            self._heard_at = self.byte_at  # what only tells that an answer is yet to come gains no time
        if answer is None:
            return
        if not answer.status:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > _MAX_HEAD_BYTES:
                self._fail(ReplicaLost("the head of an answer is too large"))
            elif self._is_in_head and self._head_clock is None:  # nearly always it comes whole, and needs no clock
                late = TimeoutError("the head of an answer did not come in time")
                self._head_clock = self._loop.call_later(self._limits.head_seconds, self._fail, late)
        elif self._num_other_bytes > _MAX_HEAD_BYTES:  # the parser holds it all, and copies it with each read
            self._fail(ReplicaLost("what stands behind or within the body is too large"))
        elif answer.num_unread_bytes > _MAX_UNREAD_BYTES and not self._is_paused:
            if answer.is_left:
                self.cut()
            else:
                self._is_paused = True
                self._transport.pause_reading()

    # ------------------------------------------------------------ the parser's

    def on_message_begin(self) -> None:
        if self._answer is None:
            raise ReplicaLost("nothing was asked")
        self._is_in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        answer = self._answer
        if answer is not None and not answer.status:  # else it comes behind a body, and nobody waits for it
            answer.headers.add(name.decode("ascii", "replace").lower(), _text(value))

    def on_headers_complete(self) -> None:
        status, answer = self._parser.get_status_code(), self._answer
        if status not in _STATUSES:
            raise ReplicaLost("the answer has a status that there is not")
        self._is_interim = 100 <= status < 200
        self._is_in_head = False
        self._forget_head_clock()
        if answer is None:
            return
        if self._is_interim:
            answer.headers.clear()
            return
        lines = answer.headers.getall("transfer-encoding", None)
        if lines is not None and lines != ["chunked"] and answer.transfer_codings not in ([], ["chunked"]):
            raise ReplicaLost("the body has a transfer coding that nobody asked for")
        answer.status = status
        answer.wake()

    def on_body(self, data: bytes) -> None:
        self._num_other_bytes = 0
        if self._answer is not None:
            self._answer.take(data)

    def on_message_complete(self) -> None:
        answer = self._answer
        if answer is None or self._is_interim:
            return
        self._answer = None
        answer.end()
        self.resume()
        # What the replica has not read of the request it may take for the next one.
        if self._parser.should_keep_alive() and not self._transport.get_write_buffer_size():
            self._client.keep(self)
        else:
            self._transport.close()

    # ------------------------------------------------------------ time

    @property
    def _look_seconds(self) -> float:
        return min(self._idle_seconds, self._silence_seconds)

    def _look(self) -> None:
        """Give up an answer that stays away, and close what nobody needs. A timer for each read would cost more."""
        now = self._loop.time()
        if self._is_paused:
            self._heard_at = now  # it is whoever reads that is slow
        due = self._heard_at + (self._idle_seconds if self._answer is None else self._silence_seconds)
        if now < due:
            self._timer = self._loop.call_at(min(due, now + self._look_seconds), self._look)
        elif self._answer is None:
            self.cut()  # closing would wait for a replica that has answered and never reads the rest of the request
        else:
            self._fail(TimeoutError("nothing came from the replica for too long"))

    def _forget_head_clock(self) -> None:
        if self._head_clock is not None:
            self._head_clock.cancel()
            self._head_clock = None

    def _fail(self, failure: Exception) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.end(failure)
        self._transport.abort()


class ReplicaClient:
    """All connections of a gateway to its replicas on which requests are sent."""

    def __init__(
        self, health: HealthSection, limits: ConnectionLimits | None = None, *, idle_seconds: float = 30.0
    ) -> None:
        """`limits` tell how long heads and bodies may take, `idle_seconds` how long a connection is kept unused."""
        self.limits = limits if limits is not None else ConnectionLimits()
        self._health = health
        self._idle_seconds = idle_seconds
        self._open: set[_Connection] = set()
        self._idle: dict[str, list[_Connection]] = {}  # by URL of the replica, the last used at the end

    async def post(self, url: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Send a request to the replica at `url` and return its answer when the head of it has come.

        Raises ReplicaUnreachable, ReplicaLost, and TimeoutError. `path` is as it stands in a request's first line.
        """
        head = _head(url, path, headers, len(body))
        kept = self._idle_connection(url)
        if kept is not None:
            try:
                return await _answer_on(kept, head, body)
            except _GivenUp:
                pass  # while nobody used it, as it seems: that says nothing of the replica, and others may be as old
        return await _answer_on(await self._connect(url), head, body)

    def give_up_silent(self, url: str, seconds: float) -> None:
        """Have whoever has heard nothing for so long of the replica at `url` hear that it is lost."""
        for connection in [item for item in self._open if item.url == url]:
            connection.cut_if_silent(seconds)

    def give_up_unanswered(self, url: str) -> None:
        """Have whoever waits for the head of an answer of the replica at `url` hear that it is lost."""
        for connection in [item for item in self._open if item.url == url]:
            connection.cut_if_unanswered()

    def is_heard(self, url: str, seconds: float) -> bool:
        """Whether anything came within the last so many seconds on a connection to `url` that is open."""
        since = asyncio.get_running_loop().time() - seconds
        return any(connection.byte_at >= since for connection in self._open if connection.url == url)

    def close(self) -> None:
        for connection in list(self._open):
            connection.cut()

    def enter(self, connection: _Connection) -> None:
        self._open.add(connection)

    def keep(self, connection: _Connection) -> None:
        self._idle.setdefault(connection.url, []).append(connection)

    def forget(self, connection: _Connection) -> None:
        self._open.discard(connection)
        idle = self._idle.get(connection.url, [])
        if connection in idle:
            idle.remove(connection)
        if not idle:
            self._idle.pop(connection.url, None)

    def _idle_connection(self, url: str) -> _Connection | None:
        idle = self._idle.get(url)
        while idle:
            connection = idle.pop()
            if connection.is_fresh and not connection.has_unread_bytes:
                return connection
            connection.cut()
        return None

    async def _connect(self, url: str) -> _Connection:
        parts = urlsplit(url)
        is_secure = parts.scheme == "https"
        assert parts.hostname is not None  # the fleet's file and the admin routes take no other
        try:
            async with asyncio.timeout(self._health.connect_seconds):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self, url, self._health.silence_seconds, self._idle_seconds),
                    parts.hostname,
                    parts.port or (443 if is_secure else 80),
                    ssl=self._trust if is_secure else None,
                )
        except TimeoutError:
            raise
        except OSError as error:
            raise ReplicaUnreachable(f"no connection to {parts.netloc} could be made") from error
        return connection

    @functools.cached_property
    def _trust(self) -> ssl.SSLContext:
        return ssl.create_default_context()


async def _answer_on(connection: _Connection, head: bytes, body: bytes) -> Answer:
    answer = connection.send(head, body)
    try:
        await answer.await_head()
    except BaseException:
        answer.close()
        raise
    return answer


def _text(value: bytes) -> str:
    """Return a header's value, whatever its bytes: what is no UTF-8 is taken for Latin-1, as once was the rule."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _head(url: str, path: str, headers: Mapping[str, str], num_body_bytes: int) -> bytes:
    """Return a request's head. Raises ValueError for a header that would be two."""
    authority, slash, prefix = url.partition("://")[2].partition("/")
    lines = [
        f"POST {slash}{prefix}{path} HTTP/1.1",
        f"host: {authority}",
        f"content-length: {num_body_bytes}",
        "accept-encoding: identity",  # callers get bodies as they come
        *[f"{name}: {value}" for name, value in headers.items()],
        "\r\n",
    ]
    text = "\r\n".join(lines)
    if text.count("\n") != text.count("\r") or text.count("\n") != len(headers) + _NUM_OWN_LINES:
        raise ValueError("a header has a line break in it")
    return text.encode("utf-8", "surrogateescape")
