"""The one catalogue of errors on the wire: code to HTTP status and OpenAI type, and the body they travel in.

A code that is not in the catalogue, or an exception that is not ours, leaves as `internal_error` with a fixed sentence:
the text of an unknown exception never reaches a caller. Knows nothing of the HTTP framework.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from penstock.errors import EngineUnavailable, LimitReached, NotAuthenticated, Overloaded, PenstockError, RequestError


class ErrorKind(NamedTuple):
    status: int
    type: str


CATALOGUE: Mapping[str, ErrorKind] = MappingProxyType(
    {
        "invalid_request": ErrorKind(400, "invalid_request_error"),
        "invalid_json": ErrorKind(400, "invalid_request_error"),
        "invalid_parameter": ErrorKind(400, "invalid_request_error"),
        "unsupported_parameter": ErrorKind(400, "invalid_request_error"),
        "context_length_exceeded": ErrorKind(400, "invalid_request_error"),
        "chat_template_failed": ErrorKind(400, "invalid_request_error"),
        "invalid_api_key": ErrorKind(401, "authentication_error"),
        "permission_denied": ErrorKind(403, "permission_error"),
        "limit_too_small": ErrorKind(400, "invalid_request_error"),
        "key_not_found": ErrorKind(404, "not_found_error"),
        "file_not_found": ErrorKind(404, "not_found_error"),
        "batch_not_found": ErrorKind(404, "not_found_error"),
        "storage_limit_reached": ErrorKind(413, "invalid_request_error"),
        "model_not_found": ErrorKind(404, "not_found_error"),
        "route_not_found": ErrorKind(404, "not_found_error"),
        "method_not_allowed": ErrorKind(405, "invalid_request_error"),
        "request_timeout": ErrorKind(408, "invalid_request_error"),
        "body_too_large": ErrorKind(413, "invalid_request_error"),
        "unsupported_media_type": ErrorKind(415, "invalid_request_error"),
        "target_unreachable": ErrorKind(422, "invalid_request_error"),
        "head_too_large": ErrorKind(431, "invalid_request_error"),
        "overloaded": ErrorKind(429, "rate_limit_error"),
        "rate_limit_exceeded": ErrorKind(429, "rate_limit_error"),
        "internal_error": ErrorKind(500, "server_error"),
        "engine_failed": ErrorKind(500, "server_error"),
        "answer_too_large": ErrorKind(502, "server_error"),
        "engine_unavailable": ErrorKind(503, "server_error"),
        "not_ready": ErrorKind(503, "server_error"),
        "engine_stalled": ErrorKind(503, "server_error"),
        "store_unavailable": ErrorKind(503, "server_error"),
        "deadline_exceeded": ErrorKind(504, "timeout_error"),
    }
)

_RESTART_SECONDS = 5  # about what an engine takes to start; nobody knows better while it is down

INTERNAL_MESSAGE = "the server made a mistake; it was logged under this response's x-request-id"


class Error(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(msgspec.Struct, frozen=True):
    error: Error


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error as it leaves the server."""

    status: int
    code: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


def reply_for(error: BaseException) -> ErrorReply:
    """Return what a caller may know of an error."""
    known = isinstance(error, PenstockError) and error.code in CATALOGUE and error.code != "internal_error"
    code = error.code if known and isinstance(error, PenstockError) else "internal_error"
    kind = CATALOGUE[code]
    param = error.param if isinstance(error, RequestError) else None
    message = str(error) if known else INTERNAL_MESSAGE
    body = msgspec.json.encode(ErrorResponse(Error(message, kind.type, param, code)))
    return ErrorReply(kind.status, code, body, _headers(error))


def _headers(error: BaseException) -> dict[str, str]:
    if isinstance(error, Overloaded):
        seconds = max(0.0, error.retry_after_seconds)
        retry = {"retry-after": str(max(1, math.ceil(seconds))), "retry-after-ms": str(math.ceil(seconds * 1000))}
        return {**retry, **error.headers} if isinstance(error, LimitReached) else retry
    if isinstance(error, EngineUnavailable):
        return {"retry-after": str(_RESTART_SECONDS)}
    if isinstance(error, NotAuthenticated):
        return {"www-authenticate": "Bearer"}
    return {}
