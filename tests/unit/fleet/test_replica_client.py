"""Requests to replicas over kept connections, against servers that say exactly what a test has them say."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from penstock.connection_limits import ConnectionLimits
from penstock.fleet.config import HealthSection
from penstock.fleet.router.replica_client import Answer, ReplicaClient, ReplicaLost, ReplicaUnreachable

HELLO = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
ALL = 1 << 30  # bytes: more than any answer here
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class Script:
    """Reads a request, then does `play`; again and again on each connection."""

    play: Callable[[asyncio.StreamWriter], Awaitable[None]]
    heads: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    num_connections: int = 0
    port: int = 0
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)  # by a client
    _serving: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        self.num_connections += 1
        with contextlib.suppress(ConnectionError):
            while head := await _head(reader):
                self.heads.append(head)
                length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
                self.bodies.append(await reader.readexactly(length))
                self.asked.set()
                await self.play(writer)
        self.left.set()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Script"]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            await asyncio.gather(*self._serving)


async def _head(reader: asyncio.StreamReader) -> str:
    try:
        return (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:
        return ""


def saying(*pieces: bytes, then_close: bool = False) -> Script:
    async def play(writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if then_close:
            writer.close()

    return Script(play)


@contextlib.asynccontextmanager
async def client(
    silence_seconds: float = 5.0, idle_seconds: float = 5.0, limits: ConnectionLimits | None = None
) -> AsyncIterator[ReplicaClient]:
    health = HealthSection(connect_seconds=2.0, silence_seconds=silence_seconds)
    made = ReplicaClient(health, limits, idle_seconds=idle_seconds)
    yield made
    made.close()
    await asyncio.sleep(0)


async def post(client: ReplicaClient, script: Script, body: bytes = b"{}") -> Answer:
    return await client.post(script.url, "/v1/completions", {"x-a": "b"}, body)


async def test_a_request_arrives_as_it_was_given() -> None:
    async with saying(HELLO).running() as script, client() as made:
        answer = await made.post(script.url + "/base", "/v1/x", {"x-a": "b"}, b'{"a":1}')
        assert (answer.status, answer.headers, await answer.read(ALL)) == (200, {"content-length": "5"}, b"hello")
        line, *headers = script.heads[0].strip().split("\r\n")
        assert line == "POST /base/v1/x HTTP/1.1" and script.bodies == [b'{"a":1}']
        assert sorted(headers) == [
            "accept-encoding: identity", "content-length: 7", f"host: 127.0.0.1:{script.port}", "x-a: b"
        ]  # fmt: skip


async def test_a_connection_is_used_again() -> None:
    async with saying(HELLO).running() as script, client() as made:
        for _ in range(3):
            async with await post(made, script) as answer:
                assert await answer.read(ALL) == b"hello"
        assert script.num_connections == 1


@pytest.mark.parametrize(
    "answered",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 5\r\n\r\nhello",
        HELLO + HELLO,  # of which nobody knows whose answer the second is
    ],
)
async def test_a_connection_that_cannot_be_trusted_is_not_used_again(answered: bytes) -> None:
    async with saying(answered).running() as script, client() as made:
        for _ in range(2):
            async with await post(made, script) as answer:
                assert await answer.read(ALL) == b"hello"
            await asyncio.sleep(0.01)
        assert script.num_connections == 2


async def test_what_came_on_a_kept_connection_is_no_answer_to_what_is_asked_behind_it() -> None:
    writers: list[asyncio.StreamWriter] = []

    async def play(writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(HELLO)

    async with Script(play).running() as script, client() as made:
        assert await (await post(made, script)).read(ALL) == b"hello"
        writers[0].write(HELLO.replace(b"hello", b"wrong"))  # it is there, and the client had no time to see it
        assert await (await post(made, script)).read(ALL) == b"hello"
        assert script.num_connections == 2


async def test_a_connection_that_nobody_uses_is_closed() -> None:
    async with saying(HELLO).running() as script, client(idle_seconds=0.05) as made:
        assert await (await post(made, script)).read(ALL) == b"hello"
        await script.left.wait()
        assert await (await post(made, script)).read(ALL) == b"hello"
        assert script.num_connections == 2


async def test_a_request_on_kept_connections_that_the_replica_has_given_up_is_sent_on_a_new_one() -> None:
    old: set[asyncio.StreamWriter] = set()

    async def play(writer: asyncio.StreamWriter) -> None:
        if writer in old:
            writer.transport.abort()
        else:
            old.add(writer)
            writer.write(HELLO)

    async with Script(play).running() as script, client() as made:
        answers = await asyncio.gather(*[post(made, script) for _ in range(3)])
        assert [await answer.read(ALL) for answer in answers] == [b"hello"] * 3
        async with await post(made, script) as answer:
            assert await answer.read(ALL) == b"hello"
        assert script.num_connections == 4 and len(script.bodies) == 5


async def test_a_kept_connection_that_breaks_off_behind_the_first_byte_loses_the_replica() -> None:
    answers = [HELLO, b"HTTP/1.1 2"]

    async def play(writer: asyncio.StreamWriter) -> None:
        writer.write(answers.pop(0))
        if not answers:
            writer.close()

    async with Script(play).running() as script, client() as made:
        assert await (await post(made, script)).read(ALL) == b"hello"
        with pytest.raises(ReplicaLost):
            await post(made, script)
        assert script.num_connections == 1


async def test_a_connection_on_which_the_request_is_never_read_to_its_end_is_freed() -> None:
    body = b"x" * 32 * 1024 * 1024
    may_read = asyncio.Event()
    rest: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _head(reader)
        writer.write(HELLO)
        await may_read.wait()
        num_bytes = 0
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1024 * 1024):
                num_bytes += len(data)
        rest.set_result(num_bytes)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, client(idle_seconds=0.02) as made:
        port = server.sockets[0].getsockname()[1]
        answer = await made.post(f"http://127.0.0.1:{port}", "/", {}, body)
        assert await answer.read(ALL) == b"hello"
        await asyncio.sleep(0.1)
        may_read.set()
        assert await rest < len(body)


async def test_requests_at_the_same_time_have_connections_of_their_own() -> None:
    async with saying(HELLO).running() as script, client() as made:
        answers = await asyncio.gather(*[post(made, script) for _ in range(3)])
        assert [await answer.read(ALL) for answer in answers] == [b"hello"] * 3
        assert script.num_connections == 3


async def test_chunks_come_without_their_frames() -> None:
    async with saying(CHUNKED, b"5\r\nhel", b"lo\r\n1\r\n!\r\n", b"0\r\n\r\n").running() as script, client() as made:
        async with await post(made, script) as answer:
            assert await answer.read(ALL) == b"hello!"
        async with await post(made, script) as answer:
            assert (await answer.read(most_bytes=3)).startswith(b"hel")


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async with saying(b"HTTP/1.1 200 OK\r\n\r\nhel", b"lo", then_close=True).running() as script, client() as made:
        assert await (await post(made, script)).read(ALL) == b"hello"


@pytest.mark.parametrize("codings", ["identity", "Identity", "identity, identity"])
async def test_an_answer_that_was_not_coded_ends_with_its_connection(codings: str) -> None:
    head = f"HTTP/1.1 200 OK\r\ntransfer-encoding: {codings}\r\n\r\nhel".encode()
    async with saying(head, b"lo", then_close=True).running() as script, client() as made:
        assert await (await post(made, script)).read(ALL) == b"hello"


@pytest.mark.parametrize("codings", ["gzip", "gzip, chunked", "chunked\r\ntransfer-encoding: gzip"])
async def test_a_transfer_coding_that_nobody_asked_for_loses_the_replica(codings: str) -> None:
    head = f"HTTP/1.1 200 OK\r\ntransfer-encoding: {codings}\r\n\r\n".encode()
    async with saying(head, then_close=True).running() as script, client() as made:
        with pytest.raises(ReplicaLost):
            await post(made, script)


async def test_headers_are_kept_as_often_as_they_stand() -> None:
    head = b"HTTP/1.1 200 OK\r\nSet-Cookie: a\r\nset-cookie: b\r\ncontent-length: 0\r\n\r\n"
    async with saying(head).running() as script, client() as made:
        assert (await post(made, script)).headers.getall("set-cookie") == ["a", "b"]


async def _drip(writer: asyncio.StreamWriter) -> None:
    while not writer.is_closing():
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)


async def test_a_head_that_drips_is_given_up() -> None:
    async def play(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n")  # it may take its time behind that
        await asyncio.sleep(0.15)
        writer.write(b"HTTP/1.1 200 OK\r\nx: ")
        await _drip(writer)

    limits = ConnectionLimits(head_seconds=0.1)
    async with Script(play).running() as script, client(limits=limits) as made:
        with pytest.raises(TimeoutError, match="head"):
            await post(made, script)


async def test_a_body_that_drips_is_given_up_unless_it_is_a_stream() -> None:
    async def play(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        await _drip(writer)

    limits = ConnectionLimits(body_seconds=0.1)
    async with Script(play).running() as script, client(limits=limits) as made, await post(made, script) as answer:
        for _ in range(10):
            assert await answer.read_any()
        await asyncio.sleep(0.15)  # who reads slowly takes nothing of its time
        with pytest.raises(TimeoutError):
            await answer.read(ALL)


async def test_what_comes_before_the_answer_is_passed_over() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    async with saying(early, HELLO).running() as script, client() as made:
        answer = await post(made, script)
        assert answer.status == 200 and "link" not in answer.headers
        assert await answer.read(ALL) == b"hello"


@pytest.mark.parametrize(
    "answered",
    [
        b"",
        b"HTTP/1.1 200",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        HELLO.replace(b"200", b"000"),
        HELLO.replace(b"200", b"099"),
        HELLO.replace(b"200", b"600"),
    ],
)
async def test_what_is_no_answer_loses_the_replica(answered: bytes) -> None:
    async with saying(answered, then_close=True).running() as script, client() as made:
        with pytest.raises(ReplicaLost):
            await post(made, script)


async def test_a_head_without_an_end_is_not_kept() -> None:
    async with saying(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 1_000_000).running() as script, client() as made:
        with pytest.raises(ReplicaLost, match="too large"):
            await post(made, script)


@pytest.mark.parametrize("begun", [b"0\r\nx-t: ", b"5;x="])
async def test_what_stands_behind_a_body_or_between_its_chunks_without_an_end_is_not_kept(begun: bytes) -> None:
    pieces = [b"y" * 65536] * 8
    script = saying(CHUNKED + b"5\r\nhello\r\n" + begun, *pieces)
    async with script.running() as script, client() as made, await post(made, script) as answer:
        assert await answer.read_any() == b"hello"
        with pytest.raises(ReplicaLost, match="too large"):
            await answer.read_any()


async def test_trailers_are_passed_over() -> None:
    chunks = CHUNKED + b"5\r\nhello\r\n0\r\nx-t: y\r\n\r\n"
    async with saying(chunks).running() as script, client() as made:
        for _ in range(2):
            async with await post(made, script) as answer:
                assert await answer.read(ALL) == b"hello"
        assert script.num_connections == 1


async def test_telling_that_the_answer_is_yet_to_come_gains_no_time() -> None:
    async def play(writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            writer.write(b"HTTP/1.1 102 Processing\r\n\r\n")
            await writer.drain()
            await asyncio.sleep(0.01)

    async with Script(play).running() as script, client(silence_seconds=0.1) as made:
        with pytest.raises(TimeoutError, match="nothing came"):
            await asyncio.wait_for(post(made, script), 5)


async def test_headers_that_are_no_utf_8_are_taken_for_latin_1() -> None:
    answered = HELLO.replace(b"content-length", b"x-a: caf\xe9\r\nx-b: caf\xc3\xa9\r\ncontent-length")
    async with saying(answered).running() as script, client() as made, await post(made, script) as answer:
        assert (answer.headers["x-a"], answer.headers["x-b"]) == ("café", "café")


async def test_an_answer_that_breaks_off_gives_what_had_come_first() -> None:
    async with saying(CHUNKED + b"5\r\nhello\r\n", then_close=True).running() as script, client() as made:
        answer = await post(made, script)
        assert await answer.read_any() == b"hello"
        with pytest.raises(ReplicaLost):
            await answer.read_any()


async def test_a_replica_that_is_not_there_is_unreachable() -> None:
    async with saying(HELLO).running() as script:
        pass
    async with client() as made:
        with pytest.raises(ReplicaUnreachable):
            await post(made, script)


@pytest.mark.parametrize("begun", [b"", CHUNKED])
async def test_a_replica_that_falls_silent_is_given_up(begun: bytes) -> None:
    async with saying(begun).running() as script, client(silence_seconds=0.05) as made:
        with pytest.raises(TimeoutError):
            await (await post(made, script)).read(ALL)
        await script.left.wait()


async def test_a_replica_is_not_read_faster_than_the_answer_is() -> None:
    async def flood(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 16777216\r\n\r\n")
        for _ in range(256):
            writer.write(b"x" * 65536)
            await writer.drain()

    # Nor is a reader's slowness the replica's silence.
    async with Script(flood).running() as script, client(silence_seconds=0.5) as made:
        answer = await post(made, script)
        await asyncio.sleep(1.0)
        assert 0 < answer.num_unread_bytes < 1024 * 1024
        assert len(await answer.read(ALL)) == 16 * 1024 * 1024


async def test_who_leaves_an_answer_early_cuts_the_connection() -> None:
    async with saying(CHUNKED, b"5\r\nhello\r\n").running() as script, client() as made:
        async with await post(made, script) as answer:
            assert await answer.read_any() == b"hello"
        await script.left.wait()


async def test_who_is_cancelled_cuts_the_connection() -> None:
    async with saying(b"").running() as script, client() as made:
        task = asyncio.create_task(post(made, script))
        await script.asked.wait()
        task.cancel()
        await script.left.wait()


async def test_a_connection_is_kept_when_only_the_end_of_its_answer_was_not_waited_for() -> None:
    may_end = asyncio.Event()

    async def play(writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + b"5\r\nhello\r\n")
        await may_end.wait()
        writer.write(b"0\r\n\r\n")

    async with Script(play).running() as script, client() as made:
        async with await post(made, script) as answer:
            assert await answer.read_any() == b"hello"
            answer.leave()
        may_end.set()
        await asyncio.sleep(0.2)
        assert await (await post(made, script)).read(ALL) == b"hello"
        assert script.num_connections == 1


async def test_a_header_cannot_be_two() -> None:
    async with client() as made:
        with pytest.raises(ValueError, match="line break"):
            await made.post("http://127.0.0.1:1", "/", {"a": "b\r\nc: d"}, b"")
