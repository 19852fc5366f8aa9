"""What a route must say of itself: path, who may call it, what it takes and gives.

Every route of the app goes through a `GuardedHandler`; `check_access` refuses an app where one does not. Knows nothing
of what the routes do.
"""

import enum
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from penstock.errors import InvalidParameter, NotPermitted
from penstock.loopback import check_open_call
from penstock.protocol.query import check_query
from penstock.protocol.voucher import VOUCHER_HEADER, read_voucher
from penstock.protocol.wire import WireModel
from penstock.store.key_ring import KeyRing
from penstock.telemetry import RequestRecord
from penstock.tenants import SHADOW_HEADER, SHADOW_TENANT, Caller, KeyTerms

Handler = Callable[[Request], Awaitable[Response]]

_RECORD = "penstock.record"
_CALLER = "penstock.caller"


class Access(enum.StrEnum):
    PUBLIC = "public"  # anyone who can connect
    CLIENT = "client"  # any API key
    ADMIN = "admin"  # an API key with admin = true


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One route, as data."""

    method: str
    path: str
    handler: Handler
    access: Access
    summary: str
    tag: str
    query: tuple[str, ...] | None = None  # its query's parameters, and no others; None: what is there means nothing
    takes: type[WireModel] | None = None
    form: Mapping[str, Any] | None = None  # the schema of a multipart form, where it takes one
    gives: type[msgspec.Struct] | str = "application/json"  # a type, or only the media type
    streams: type[msgspec.Struct] | None = None  # the type of its server-sent events
    in_document: bool = True


class GuardedHandler:
    """A route's handler behind its access check."""

    def __init__(
        self, endpoint: Endpoint, keys: KeyRing, fleet_secret: str | None = None, *, needs_key: bool = False
    ) -> None:
        """Without the secret no gateway can vouch for anything. With `needs_key` it is never open, unless public."""
        self.endpoint = endpoint
        self._keys = keys
        self._fleet_secret = fleet_secret
        self._needs_key = needs_key

    async def __call__(self, request: Request) -> Response:
        record = record_of(request)
        record.route = self.endpoint.path
        if self.endpoint.access is not Access.PUBLIC:
            if self._keys.is_open:
                check_open_call(request.method, request.headers, _own_address(request))
            known = self._keys.identify(request.headers.get("authorization"), needs_key=self._needs_key)
            caller = self._vouched(known, request)
            if SHADOW_HEADER in request.headers:
                caller = _as_shadow(caller)
            record.tenant = caller.tenant
            if self.endpoint.access is Access.ADMIN and not caller.terms.admin:
                raise NotPermitted("this route needs an API key with admin = true")
            request.scope[_CALLER] = caller
        if self.endpoint.query is not None:
            check_query([name for name, _ in request.query_params.multi_items()], self.endpoint.query)
        _check_texts(request)
        return await self.endpoint.handler(request)

    def _vouched(self, caller: Caller, request: Request) -> Caller:
        given = request.headers.get(VOUCHER_HEADER)
        if given is None or self._fleet_secret is None:
            return caller
        voucher = read_voucher(given, self._fleet_secret, request.headers.get("authorization"))
        return msgspec.structs.replace(caller, voucher=voucher)


def _check_texts(request: Request) -> None:
    """Raise for a NUL in what the URL names. Nothing is called so, and not every store can be asked for it."""
    for name, value in (*request.path_params.items(), *request.query_params.multi_items()):
        if "\0" in value:
            raise InvalidParameter(name, value, "send texts without NUL characters")


def _own_address(request: Request) -> str | None:
    """Return the address that the connection came to; None: a Unix socket."""
    address, port = request.scope.get("server") or (None, None)
    return address if port is not None else None


def _as_shadow(caller: Caller) -> Caller:
    """Return whom a gateway's copy of a request counts for. Raises NotPermitted, or anybody could go unbilled."""
    if not caller.terms.admin:
        raise NotPermitted(f"the header {SHADOW_HEADER} needs an API key with admin = true")
    return Caller(SHADOW_TENANT, KeyTerms(admin=True))


def check_access(routes: Iterable[BaseRoute]) -> None:
    """Raise unless every route declares who may call it."""
    for route in routes:
        handler = getattr(route, "endpoint", None)
        if not isinstance(handler, GuardedHandler) or not isinstance(handler.endpoint.access, Access):
            raise RuntimeError(
                f"route {getattr(route, 'path', route)!r} declares no access class; add an Endpoint for it"
            )


def attach_record(scope: MutableMapping[str, Any], record: RequestRecord) -> None:
    scope[_RECORD] = record


def record_of(request: Request) -> RequestRecord:
    """Return the record that the front door opened for this request."""
    record = request.scope[_RECORD]
    assert isinstance(record, RequestRecord)
    return record


def caller_of(request: Request) -> Caller:
    """Return who calls. Only for routes that are not public."""
    caller = request.scope[_CALLER]
    assert isinstance(caller, Caller)
    return caller
