"""The outermost layer of the app: an id, a record, a log line and a count for every request.

Also the last place where an exception can be caught: what nobody expected leaves as `internal_error` and is logged.
A plain ASGI middleware, so that streams pass through it untouched.
"""

import logging
import re
import time
import uuid

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.errors import RequestError
from penstock.protocol.errors import reply_for
from penstock.protocol.host import check_host
from penstock.server.body import UnreadBody
from penstock.server.endpoint import attach_record
from penstock.server.metrics import ServerMetrics
from penstock.server.streaming import CLIENT_GONE_STATUS
from penstock.telemetry import RequestRecord, log_request

_logger = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_QUIET_ROUTES = frozenset({"/live", "/ready", "/metrics"})  # asked again and again; whoever asks has the answer
_MAX_PATH = 200


class FrontDoor:
    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = _open_record(scope)
        attach_record(scope, record)
        body = UnreadBody(scope, receive)
        identity = (b"x-request-id", record.request_id.encode())

        async def send_with_identity(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), identity]
                if record.status >= 400:
                    await body.discard()
            await send(message)

        try:
            check_host(scope["http_version"], sum(name == b"host" for name, _ in scope["headers"]))
            await self._app(scope, body.receive, send_with_identity)
        except RequestError as error:
            record.error_code = error.code
            await _send_error(error, send_with_identity)
        except ClientDisconnect:
            record.finish = "abort"
            record.status = record.status or CLIENT_GONE_STATUS
        except Exception as error:
            _logger.exception("unexpected failure (request %s)", record.request_id)
            record.error_code = "internal_error"
            if record.status:
                raise  # too late for an answer: the server cuts the connection
            await _send_error(error, send_with_identity)
        finally:
            record.total_seconds = time.monotonic() - record.arrival
            self._metrics.observe(record)
            if record.route not in _QUIET_ROUTES:
                log_request(record)


def _open_record(scope: Scope) -> RequestRecord:
    given = Headers(scope=scope).get("x-request-id", "")
    request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    return RequestRecord(
        request_id=request_id, method=scope["method"], path=scope["path"][:_MAX_PATH], arrival=time.monotonic()
    )


async def _send_error(error: Exception, send: Send) -> None:
    reply = reply_for(error)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(reply.body)).encode())]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
