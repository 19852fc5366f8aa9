"""A streaming HTTP client that measures: when a request left, when each token came, how it ended.

A request that fails is a measurement too, with its kind of error; only a server that cannot be used at all raises.
"""

import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import urlsplit

import aiohttp

from penstock.errors import RemoteError
from penstock.tools.bench.request_body import Dialect
from penstock.tools.bench.stream_scan import StreamScan, parse, read_reason

CONNECT_SECONDS = 30.0
SILENCE_SECONDS = 600.0  # between two reads: the first token may wait for a long queue
MAX_ERROR_BYTES = 64 * 1024


@dataclass(slots=True)
class Measurement:
    """One request as it went. Times are the clock's, in seconds; tokens are the server's count where it gives one."""

    sent: float
    ended: float = 0.0
    token_times: "array[float]" = field(default_factory=lambda: array("d"))
    error: str | None = None  # a kind, few in number: what reports count by
    error_text: str = ""
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None

    def fail(self, kind: str, text: str = "") -> None:
        self.error, self.error_text = kind, text


class StreamClient:
    """One server. Use as an asynchronous context manager."""

    def __init__(self, url: str, api_key: str | None = None, *, now: Callable[[], float] = time.perf_counter) -> None:
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self.num_open = 0  # requests
        self.last_heard = now()  # when the server last said anything, or was first asked
        self._now = now
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def __aenter__(self) -> "StreamClient":
        if not _is_url(self.url):
            raise RemoteError(f"{self.url!r} is not a URL; give one such as http://127.0.0.1:8000")
        if not self._headers.get("Authorization", "").isprintable():
            raise RemoteError("the key has a character that no header can; check --api-key or PENSTOCK_API_KEY")
        # A proxy from the environment is for servers elsewhere; it cannot reach this machine's own loopback.
        use_proxy = urlsplit(self.url).hostname not in ("127.0.0.1", "localhost", "::1")
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=use_proxy,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def first_model(self) -> str:
        """Return the name of the first model served."""
        try:
            with self._open_request():
                async with self._session.get(self.url + "/v1/models", allow_redirects=False) as response:
                    status, body = response.status, await response.content.read(MAX_ERROR_BYTES)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RemoteError(f"no server answers at {self.url}; start one, or name another with --url") from error
        if status == 401:
            raise RemoteError(f"{self.url} wants a key; give it with --api-key or PENSTOCK_API_KEY")
        document = parse(body)
        listed = document.get("data") if isinstance(document, dict) else None
        if not (isinstance(listed, list) and listed and isinstance(listed[0], dict) and "id" in listed[0]):
            raise RemoteError(f"{self.url} lists no models (status {status}); name one with --model")
        return str(listed[0]["id"])

    async def measure(self, body: bytes, dialect: Dialect) -> Measurement:
        """Send one request and follow its answer to the end."""
        measurement = Measurement(sent=self._now())
        scan = StreamScan(chat=dialect.chat)
        try:
            with self._open_request():
                await self._ask(body, dialect, scan, measurement)
        except TimeoutError:
            measurement.fail("timeout", "the server said nothing for too long")
        except aiohttp.ClientConnectorError as error:
            measurement.fail("connect", str(error))
        except (aiohttp.ClientError, ConnectionError) as error:
            measurement.fail("cut", str(error))
        measurement.ended = self._now()
        measurement.token_times = scan.token_times
        return measurement

    @contextmanager
    def _open_request(self) -> Iterator[None]:
        if not self.num_open:
            self.last_heard = self._now()
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    async def _ask(self, body: bytes, dialect: Dialect, scan: StreamScan, measurement: Measurement) -> None:
        async with self._session.post(self.url + dialect.path, data=body, allow_redirects=False) as response:
            if response.status != 200:
                refusal = await response.content.read(MAX_ERROR_BYTES)
                self.last_heard = self._now()
                measurement.fail(f"http {response.status}", read_reason(refusal))
            elif response.content_type != "text/event-stream":
                measurement.fail("not a stream", f"the answer is {response.content_type}")
            else:
                await self._follow(response, scan, measurement)

    async def _follow(self, response: aiohttp.ClientResponse, scan: StreamScan, measurement: Measurement) -> None:
        now = self._now
        async for chunk in response.content.iter_any():
            self.last_heard = now()
            if not scan.push(chunk, self.last_heard):
                return measurement.fail("not a stream", "a line of it does not end")
        ending = scan.end()
        measurement.input_tokens = ending.input_tokens
        measurement.cached_tokens = ending.cached_tokens
        measurement.output_tokens = ending.output_tokens
        if ending.error is not None:
            measurement.fail("error event", ending.error)
        elif not ending.is_whole:
            measurement.fail("cut", "the stream ended before the answer did")
        return None


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        # A port that is no number is noticed as it is read.
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
