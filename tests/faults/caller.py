"""Callers by the hundred in one event loop, each of whose requests ends in exactly one way that is written down."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

State = Literal["completed", "error", "connection_error", "left"]


@dataclass
class Outcome:
    """How one request ended, as its caller saw it."""

    state: State
    code: str | None = None  # of a typed error
    num_events: int = 0
    ended: float = field(default_factory=time.monotonic)


def completion_body(**changes: object) -> bytes:
    body = {
        "model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True, "stream": True, "temperature": 0,
        **changes,
    }  # fmt: skip
    return json.dumps(body).encode()


def request_bytes(body: bytes, path: str = "/v1/completions", request_id: str = "") -> bytes:
    name = f"x-request-id: {request_id}\r\n" if request_id else ""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n{name}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def call(url: str, body: bytes, *, leave_after_seconds: float | None = None, leave_unsent: int = 0) -> Outcome:
    """Send a request and read its answer to the end, or leave early: `leave_unsent` bytes before the request's end."""
    writer = None
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
        data = request_bytes(body)
        writer.write(data[: len(data) - leave_unsent])
        if leave_after_seconds is None:
            return _outcome(await reader.read())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(leave_after_seconds):
                return _outcome(await reader.read())
        return Outcome("left")
    except OSError:
        return Outcome("connection_error")
    finally:
        if writer is not None:
            writer.transport.abort()


def _outcome(answer: bytes) -> Outcome:
    head, _, rest = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        return Outcome("connection_error")
    num_events = rest.count(b"data: ")
    errors = rest.count(b'{"error":{')
    done = rest.count(b"data: [DONE]")
    if errors + done == 1:
        if done:
            return Outcome("completed", None, num_events)
        text = rest[rest.index(b'{"error":{') :].splitlines()[0]
        return Outcome("error", json.loads(text)["error"]["code"], num_events)
    whole = head.startswith(b"HTTP/1.1 200") and b"text/event-stream" not in head and not errors
    if whole and b'"usage"' in rest:
        return Outcome("completed", None, num_events)
    assert errors + done == 0, "an answer has one end"
    return Outcome("connection_error", None, num_events)  # cut without a word


def tally(outcomes: list[Outcome]) -> Counter[str]:
    return Counter(outcome.state for outcome in outcomes)
