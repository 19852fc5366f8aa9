"""Requests to replicas: which headers go along, which come back, and what a failure says of the replica.

Knows nothing of policies or of the caller's connection.
"""

import asyncio
import dataclasses
import errno
import math
import ssl
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import aiohttp
import msgspec
from multidict import CIMultiDict, MultiDict, MultiMapping
from yarl import URL

from penstock.errors import EngineFailed, EngineUnavailable, Overloaded
from penstock.fleet.config import HealthSection
from penstock.fleet.replica import Replica
from penstock.fleet.router.replica_client import Answer, ReplicaLost, ReplicaUnreachable
from penstock.protocol.errors import ErrorReply, reply_for
from penstock.protocol.frames import FRAMES_HEADER
from penstock.protocol.identity import IDENTITY_HEADER
from penstock.protocol.prompt_note import PROMPT_HEADER
from penstock.protocol.voucher import VOUCHER_HEADER

# What a broken or missing replica raises.
UPSTREAM_ERRORS = (aiohttp.ClientError, ConnectionError, asyncio.TimeoutError)
RETRIED_STATUSES = frozenset({500, 502, 503, 504})
_MAX_ERROR_BYTES = 64 * 1024
_MAX_COMMENT_BYTES = 64 * 1024
_NO_WAY_THERE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH})

_NOT_SENT = frozenset(
    {
        "host",
        "connection",
        "keep-alive",
        "proxy-connection",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "content-length",
        "accept-encoding",
        "expect",
        VOUCHER_HEADER,
        "sec-fetch-site",  # the gateway has judged it
    }
)
# Of a request, these are for all who read it, whatever a caller says of its connection (RFC 9110, 7.6.1).
_NEVER_LEFT_OUT = frozenset({"authorization", "content-type"})
_OF_BODIES = frozenset({"content-type", "content-encoding"})
_FOR_GATEWAYS = frozenset({FRAMES_HEADER, PROMPT_HEADER, IDENTITY_HEADER})
_NOT_RETURNED = _NOT_SENT | _FOR_GATEWAYS | {"date", "server", "x-request-id"}


class _ErrorBody(msgspec.Struct):
    code: str | int | None = None
    message: str = ""


class _ErrorDocument(msgspec.Struct):
    error: _ErrorBody = msgspec.field(default_factory=_ErrorBody)


def new_session(health: HealthSection) -> aiohttp.ClientSession:
    """Return the gateway's client for all but callers' requests (`ReplicaClient`): connections are kept."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=health.connect_seconds, sock_read=health.silence_seconds
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    )


def request_headers(given: MultiMapping[str], replica: Replica, request_id: str, *, has_keys: bool) -> MultiDict[str]:
    """Return a caller's headers, by names in lower case, as they go to a replica.

    A foreign server never sees a key of ours.
    """
    headers = MultiDict(_end_to_end(given, _NOT_SENT))
    headers["x-request-id"] = request_id
    if replica.adapter.kind != "penstock":
        if has_keys:
            headers.popall("authorization", None)
        headers.update(own_headers(replica))
    return headers


def hides_callers_key(replica: Replica, *, has_keys: bool) -> bool:
    """Whether a replica never sees with which key its caller came, so that a refused key is none of the caller's."""
    return replica.adapter.kind != "penstock" and (has_keys or replica.key_file is not None)


def own_headers(replica: Replica) -> dict[str, str]:
    """Return the gateway's own key for a replica, where it has one."""
    if replica.key_file is None:
        return {}
    try:
        key = Path(replica.key_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return {}  # the replica will say that it misses the key
    return {"authorization": f"Bearer {key}"}


def response_headers(given: MultiMapping[str]) -> CIMultiDict[str]:
    """Return a replica's headers as they go back to the caller."""
    return CIMultiDict(_end_to_end(given, _NOT_RETURNED))


def _end_to_end(given: MultiMapping[str], left_out: frozenset[str]) -> list[tuple[str, str]]:
    """Return headers, as often as they stand, but for some, and for those that are for this connection alone."""
    if (connection := given.getall("connection", None)) is not None:
        left_out |= {name.strip().lower() for line in connection for name in line.split(",")} - _NEVER_LEFT_OUT
    return [(name, value) for given_name, value in given.items() if (name := given_name.lower()) not in left_out]


def target(replica: Replica, path: str) -> URL:
    return URL(replica.url + path, encoded=True)


async def read_error(read: Callable[[int], Awaitable[bytes]]) -> bytes:
    """Return an error's body; nothing where it does not come, or is too large. `read` takes the most that is wanted."""
    try:
        body = await read(_MAX_ERROR_BYTES + 1)
    except UPSTREAM_ERRORS:
        return b""
    return body if len(body) <= _MAX_ERROR_BYTES else b""


def refusal_reply(status: int, code: str, body: bytes, headers: CIMultiDict[str]) -> ErrorReply:
    """Return a replica's refusal as its caller gets it: in its own words, if they came whole."""
    if not body:
        body = reply_for(EngineFailed(f"a replica answered {status}, and no more that could be passed on")).body
        headers = CIMultiDict((name, value) for name, value in headers.items() if name not in _OF_BODIES)
        headers["content-type"] = "application/json"
    return ErrorReply(status, code, body, headers)


def with_retry_after(refusal: ErrorReply, own: ErrorReply) -> ErrorReply:
    """Return a replica's refusal, with what the gateway's own says of when to try again where it says nothing."""
    if any(name.lower().startswith("retry-after") for name in refusal.headers):
        return refusal
    headers = CIMultiDict(refusal.headers)
    headers.update(own.headers)
    return dataclasses.replace(refusal, headers=headers)


async def read_beginning(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Return an answer's body, or so much of its beginning. Raises aiohttp.ClientError, TimeoutError."""
    body = bytearray()
    while len(body) < most_bytes and (data := await response.content.read(most_bytes - len(body))):
        body += data
    return bytes(body)


async def first_events(answer: Answer) -> bytes:
    """Return how a stream begins: before that another replica may answer. Nothing, where it is framed.

    Frames come with their first token. Others may send a stream's head at once, and comments. Raises ReplicaLost.
    """
    if answer.headers.get(FRAMES_HEADER) is not None:
        return b""
    begun = b""
    while b"data:" not in begun and len(begun) < _MAX_COMMENT_BYTES:
        data = await answer.read_any()
        if not data:
            raise ReplicaLost("a stream ended before it began")
        begun += data
    return begun


def error_code(body: bytes) -> str:
    """Return the code in an error of OpenAI's shape, or nothing."""
    try:
        return str(msgspec.json.decode(body, type=_ErrorDocument).error.code or "")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """Return how long a refusal says to wait; None where it says nothing."""
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) / unit
        except ValueError:
            continue
        if math.isfinite(seconds) and seconds >= 0:
            return min(seconds, 3600.0)
    return None


def blame(replica: Replica, reason: str, blamed: set[str] | None) -> None:
    """Tell a replica's breaker of a failure, unless it is among those on which the same request has been blamed.

    However often one request is tried, and whatever it does to replicas, it must not have any of them ejected.
    """
    if blamed is None or replica.url not in blamed:
        replica.breaker.on_failure(reason)
    if blamed is not None:
        blamed.add(replica.url)


def note_failure(replica: Replica, error: BaseException, blamed: set[str] | None = None) -> str:
    """Tell a replica's breaker of a request that failed on the way; return what was told."""
    is_refused = isinstance(error, aiohttp.ClientConnectorError | ReplicaUnreachable)
    if is_refused:
        reason = _why_unreachable(error)
    elif isinstance(error, asyncio.TimeoutError):
        reason = "it did not answer in time"
    else:
        reason = "it broke a connection"
    if is_refused:
        replica.breaker.on_failure(reason, is_fatal=True)
    else:
        blame(replica, reason, blamed)
    return reason


def _why_unreachable(error: BaseException) -> str:
    cause = error.__cause__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({cause.verify_message.rstrip('.')})"
    if isinstance(cause, ssl.SSLError):
        return f"no TLS connection comes about ({cause.reason or 'no reason is given'})"
    return "it refuses connections"


def is_unheard(error: BaseException) -> bool:
    """Whether a failed probe says that nothing is heard of a replica, as of a machine that is gone.

    One that refuses connections is there, and may finish what it has.
    """
    return isinstance(error, asyncio.TimeoutError) or getattr(error, "errno", None) in _NO_WAY_THERE


def note_refusal(replica: Replica, status: int, code: str, blamed: set[str] | None = None) -> None:
    """Tell a replica's breaker of an answer that only another replica can make good."""
    if code in (EngineUnavailable.code, "not_ready"):
        replica.breaker.on_probe(False, f"it answered {code}")
    elif code != Overloaded.code:
        blame(replica, f"it answered {status} {code}".rstrip(), blamed)
