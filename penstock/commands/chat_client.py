"""A streaming client of any server that speaks OpenAI's chat API.

Knows HTTP and server-sent events. Knows nothing of the terminal or of who serves.
"""

import json
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from penstock.errors import RemoteError

MAX_EVENT_BYTES = 8 * 1024 * 1024
MAX_ERROR_BYTES = 64 * 1024
CONNECT_SECONDS = 10.0
# Between two pieces of an answer. The first may wait for a long queue, so there is no limit on the whole.
SILENCE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str


@dataclass(slots=True)
class Answer:
    """An answer as far as it has come. Times are `time.monotonic()`."""

    started: float
    text: str = ""
    first_text: float | None = None
    ended: float | None = None
    num_pieces: int = 0
    num_tokens: int | None = None  # as the server counted them; None until it says
    finish_reason: str | None = None

    @property
    def first_text_seconds(self) -> float | None:
        return None if self.first_text is None else self.first_text - self.started

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after the first over the time they took. None where there is too little to tell."""
        num_tokens = self.num_tokens if self.num_tokens is not None else self.num_pieces
        if self.first_text is None or self.ended is None or num_tokens < 2 or self.ended <= self.first_text:
            return None
        return (num_tokens - 1) / (self.ended - self.first_text)


class EventParser:
    """Turns bytes of a `text/event-stream` into the data of its events, however the bytes are cut."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._buffer = b""
        self._data: list[bytes] = []
        self._num_data_bytes = 0

    def push(self, chunk: bytes) -> list[str]:
        """Return the data of every event that `chunk` completes. Comments and other fields are dropped."""
        self._buffer += chunk
        # A carriage return at the end may be half of a line's end: it waits for the next chunk.
        held = b"\r" if self._buffer.endswith(b"\r") else b""
        text = self._buffer[: len(self._buffer) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = text.split(b"\n")
        self._buffer = rest + held
        events = [event for event in map(self._take_line, lines) if event is not None]
        if len(self._buffer) + self._num_data_bytes > self._max_event_bytes:
            raise RemoteError(f"the server sent an event of more than {self._max_event_bytes} bytes")
        return events

    def _take_line(self, line: bytes) -> str | None:
        if line:
            field, _, value = line.partition(b":")
            if field == b"data":
                self._data.append(value.removeprefix(b" "))
                self._num_data_bytes += len(value)
            return None
        if not self._data:
            return None
        event = b"\n".join(self._data).decode("utf-8", "replace")
        self._data, self._num_data_bytes = [], 0
        return event


class ChatClient:
    """One server. `aclose()` when done."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def models(self) -> dict[str, int | None]:
        """Return the names of the models served, and their context lengths where the server tells."""
        body = bytearray()
        async for chunk in self._chunks("GET", "/v1/models", None):
            body += chunk
        listed = _parse(bytes(body)).get("data")
        if not isinstance(listed, list):
            raise RemoteError(f"{self.url} does not list its models as OpenAI's API does; check the URL")
        return {
            str(item["id"]): length if isinstance(length := item.get("max_context_tokens"), int) else None
            for item in listed
            if isinstance(item, dict) and "id" in item
        }

    async def stream(
        self, messages: list[Message], model: str, answer: Answer, sampling: Mapping[str, float | int]
    ) -> AsyncGenerator[str, None]:
        """Yield the answer's pieces as they come, and note in `answer` what is known of it so far."""
        body = {
            "model": model,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            **sampling,
        }
        parser = EventParser()
        try:
            async with aclosing(self._chunks("POST", "/v1/chat/completions", body)) as chunks:
                async for chunk in chunks:
                    for data in parser.push(chunk):
                        if data == "[DONE]":
                            return
                        piece = _take_event(_parse(data), answer)
                        if piece:
                            yield piece
        finally:
            answer.ended = time.monotonic()
        if answer.finish_reason is None:
            raise RemoteError(f"{self.url} ended the answer before it was complete")

    async def _chunks(self, method: str, path: str, body: object | None) -> AsyncGenerator[bytes, None]:
        try:
            async with self._open().request(method, self.url + path, json=body, allow_redirects=False) as response:
                if response.status != 200:
                    raise _refusal(self.url, response.status, await _read_error(response))
                async for chunk in response.content.iter_any():
                    yield chunk
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError, UnicodeError) as error:  # the last: no host's name
            raise RemoteError(f"{self.url!r} is not a URL; give one such as http://127.0.0.1:8000") from error
        except aiohttp.ClientConnectorError as error:
            raise RemoteError(
                f"no server answers at {self.url}; start one with `penstock serve`, or name another with --url"
            ) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RemoteError(f"the connection to {self.url} broke before the answer was complete") from error

    def _open(self) -> aiohttp.ClientSession:
        """Return the session; the first call, inside the event loop, makes it."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
            # A proxy from the environment is for servers elsewhere; it cannot reach this machine's own loopback.
            use_proxy = _host(self.url) not in ("127.0.0.1", "localhost", "::1")
            self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout, trust_env=use_proxy)
        return self._session


def _host(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError as error:
        raise aiohttp.InvalidURL(url) from error


async def _read_error(response: aiohttp.ClientResponse) -> bytes:
    """Return the beginning of an error's body: a server's word for what is wrong is never long."""
    return await response.content.read(MAX_ERROR_BYTES)


def _parse(data: str | bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise RemoteError("the server sent something that is not OpenAI's API; check the URL")
    return document


def _take_event(event: dict[str, Any], answer: Answer) -> str:
    """Note one chunk of a chat completion and return its text."""
    if isinstance(event.get("error"), dict):
        raise RemoteError(f"the server broke off: {event['error'].get('message', 'no reason given')}")
    usage = event.get("usage")
    if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
        answer.num_tokens = usage["completion_tokens"]
    choices = event.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return ""
    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    delta = choice.get("delta")
    piece = delta.get("content") if isinstance(delta, dict) else None
    if not isinstance(piece, str) or not piece:
        return ""
    if answer.first_text is None:
        answer.first_text = time.monotonic()
    answer.num_pieces += 1
    answer.text += piece
    return piece


def _refusal(url: str, status: int, body: bytes) -> RemoteError:
    try:
        error = json.loads(body)["error"]
        message, code = error["message"], error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        message, code = "no reason given", None
    if status == 401:
        return RemoteError(f"{url} wants another key ({message}); give it with --api-key or PENSTOCK_API_KEY")
    return RemoteError(f"{url} refused with status {status}: {message}", remote_code=code)
