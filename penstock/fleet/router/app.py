"""The gateway's HTTP app: OpenAI's routes for every model behind it, and pages for operators.

Gives every request an id, a record and a log line, and every error the catalogue's shape. Knows nothing of sockets.
"""

import asyncio
import logging
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from penstock.errors import (
    EngineUnavailable,
    MethodNotAllowed,
    NotPermitted,
    NotReady,
    PenstockError,
    RequestError,
    RouteNotFound,
    UnknownModel,
    UnusableAlias,
)
from penstock.fleet.autoscaler.autoscaler import Autoscaler
from penstock.fleet.config import FleetConfig
from penstock.fleet.discovery.registration import Registration
from penstock.fleet.introduction import Introductions
from penstock.fleet.replica import ReplicaPool
from penstock.fleet.rollout.rollouts import Rollouts
from penstock.fleet.rollout.routes import rollout_routes
from penstock.fleet.router.account import Account
from penstock.fleet.router.admin import admin_routes, autoscaler_routes
from penstock.fleet.router.admin_route import AdminRoute, Handler
from penstock.fleet.router.connection import Connections, Refusal, leave_to_reader, read_body
from penstock.fleet.router.decisions import ROUTE_HEADER, Decision, DecisionLog
from penstock.fleet.router.dispatch import Dispatcher
from penstock.fleet.router.downstream import BEGUN, ClientGone, Downstream
from penstock.fleet.router.file_proxy import PATTERN, FileProxy
from penstock.fleet.router.health import HealthMonitor
from penstock.fleet.router.metrics import GatewayMetrics
from penstock.fleet.router.open_requests import OpenRequests
from penstock.fleet.router.proxy import Proxy
from penstock.fleet.router.query import RouteQuery, read_document, read_head, too_deep
from penstock.fleet.router.urgency import urgency_of
from penstock.loopback import check_open_call
from penstock.metering.meter import Meter
from penstock.protocol.errors import reply_for
from penstock.protocol.health import Health
from penstock.protocol.host import check_host
from penstock.protocol.identity import IDENTITY_HEADER, encode_identity
from penstock.protocol.media_type import check_json
from penstock.protocol.models import Model, ModelList
from penstock.store.key_ring import KeyRing
from penstock.telemetry import RequestRecord, log_request
from penstock.tenants import Caller

RECORD = web.RequestKey("record", RequestRecord)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_QUIET_ROUTES = frozenset({"/live", "/ready", "/metrics"})
_ADMIN_PREFIX = "/admin/"
# What a model answers. Servers have more below /v1, and some of it is no caller's: vLLM loads adapters from any folder.
_MODEL_ROUTES = (
    "chat/completions", "completions", "responses", "messages", "messages/count_tokens", "embeddings", "rerank",
    "reranking", "score", "classify", "moderations", "tokenize", "detokenize", "audio/speech", "images/generations",
)  # fmt: skip
_GONE_STATUS = 499  # for logs and metrics only
_LAST_SECONDS = 1.0  # to tell a caller whose answer does not end within the drain
_SESSION_HEADER = "x-session-id"
_VERSION_HEADER = "x-penstock-version"

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class GatewayContext:
    """What the routes share."""

    config: FleetConfig
    pool: ReplicaPool
    ring: KeyRing
    introductions: Introductions
    monitor: HealthMonitor
    dispatcher: Dispatcher
    proxy: Proxy
    files: FileProxy
    metrics: GatewayMetrics
    decisions: DecisionLog
    registration: Registration
    rollouts: Rollouts
    connections: Connections
    autoscalers: Sequence[Autoscaler]
    max_body_bytes: int
    meter: Meter | None = None  # None: the gateway counts nothing itself
    draining: bool = False
    drain_seconds: float = 30.0
    open_requests: OpenRequests = field(default_factory=OpenRequests)


def create_app(context: GatewayContext) -> web.Application:
    """Return the app of the public port. With keys it has the admin routes too, for keys with admin = true."""
    app = _bare_app(context)
    routes = _Routes(context)
    for method in ("GET", "POST", "DELETE"):
        _add_route(app, method, PATTERN, routes.files)
    for path in _MODEL_ROUTES:
        _add_route(app, "POST", f"/v1/{path}", routes.forward)
    app.router.add_get("/v1/models", routes.list_models)
    app.router.add_get("/v1/models/{model:.+}", routes.show_model)
    app.router.add_get("/live", routes.live)
    app.router.add_get("/ready", routes.ready)
    app.router.add_get("/metrics", routes.admin_only(routes.metrics))
    for route in _admin_routes(context):
        _add_route(app, route.method, route.path, routes.admin_only(route.answer, needs_keys=True))
    return app


def create_admin_app(context: GatewayContext, *, needs_key: bool) -> web.Application:
    """Return the app of the admin socket. Without `needs_key`, who can open the socket may do everything there."""
    app = _bare_app(context)
    routes = _Routes(context)
    for route in _admin_routes(context):
        answer = routes.admin_only(route.answer, needs_keys=True) if needs_key else route.answer
        _add_route(app, route.method, route.path, answer)
    return app


def _add_route(app: web.Application, method: str, path: str, handler: Handler) -> None:
    app.router.add_route(method, path, handler, expect_handler=leave_to_reader)


def _admin_routes(context: GatewayContext) -> list[AdminRoute]:
    async def read(request: web.Request) -> bytes:
        return await read_body(request, context.max_body_bytes, context.connections)

    return [
        *admin_routes(
            context.pool, context.registration, context.decisions, context.introductions, context.monitor.refusal, read
        ),
        *rollout_routes(context.rollouts, read),
        *autoscaler_routes(context.autoscalers, context.pool.clock),
    ]


def _bare_app(context: GatewayContext) -> web.Application:
    app = web.Application(middlewares=[_front_door(context)])
    identity = encode_identity(context.introductions.identity)

    async def sign(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.pop("Server", None)  # versions are nobody's business
        response.headers[IDENTITY_HEADER] = identity  # or another gateway could take this one for a server

    async def drain(app: web.Application) -> None:
        await context.open_requests.drain(context.drain_seconds, _LAST_SECONDS)

    app.on_response_prepare.append(sign)
    app.on_shutdown.append(drain)  # which comes before the framework's own wait
    return app


class _Routes:
    def __init__(self, context: GatewayContext) -> None:
        self._context = context

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Have a replica answer."""
        context, record = self._context, request[RECORD]
        record.route = record.path
        caller = self._identify(request)
        check_json(request.headers)
        body = await read_body(request, context.max_body_bytes, context.connections)
        head = read_head(body)
        model = context.config.aliases.get(head.model, head.model)
        self._check_model(head.model, model, caller)
        if model != head.model:
            body = msgspec.json.encode({**read_document(body), "model": model})
        record.model, record.stream = model, bool(head.stream)
        query = RouteQuery(
            head, model=model, tenant=caller.tenant, session=request.headers.get(_SESSION_HEADER),
            version=request.headers.get(_VERSION_HEADER),
        )  # fmt: skip
        decision = Decision(
            request_id=record.request_id, time=time.time(), tenant=caller.tenant, model=model,
            policy=context.config.policy_of(model), replica="", reason="", attempts=0, waited_seconds=0.0,
        )  # fmt: skip
        try:
            response = await context.proxy.forward(
                request, body, query, record, decision,
                streams=bool(head.stream), urgency=urgency_of(head, caller.terms, record.arrival),
                has_keys=not context.ring.is_open,
                account=Account(context.meter, caller, model, head), hides_usage=not head.wants_usage,
            )  # fmt: skip
            decision.status = response.status
            return response
        except (PenstockError, RecursionError) as failure:
            error = failure if isinstance(failure, PenstockError) else too_deep()
            if isinstance(error, UnknownModel):
                error = UnknownModel(head.model, self._names_for(caller))  # and none that its key may not
            decision.refuse(str(error), time.monotonic() - record.arrival)
            refusal = _error(request, error)
            refusal.headers[ROUTE_HEADER] = decision.header()
            decision.status = refusal.status
            return refusal
        except (ClientGone, asyncio.CancelledError):
            decision.status = _GONE_STATUS
            raise
        finally:
            decision.error_code = record.error_code
            context.decisions.add(decision)
            context.metrics.observe(decision)

    async def files(self, request: web.Request) -> web.StreamResponse:
        """Have a replica answer for the store that all of them share."""
        self._identify(request)
        context, record = self._context, request[RECORD]
        record.route = f"/v1/{request.match_info['kind']}"
        return await context.files.forward(
            request, record.request_id, max_body_bytes=context.max_body_bytes, has_keys=not context.ring.is_open
        )

    async def list_models(self, request: web.Request) -> web.StreamResponse:
        caller = self._identify(request)
        return _json(ModelList(data=[self._describe(name) for name in self._names_for(caller)]))

    async def show_model(self, request: web.Request) -> web.StreamResponse:
        names, name = self._names_for(self._identify(request)), request.match_info["model"]
        if name not in names:
            raise UnknownModel(name, names)
        return _json(self._describe(name))

    async def live(self, request: web.Request) -> web.StreamResponse:
        return _json(Health("live"))

    async def ready(self, request: web.Request) -> web.StreamResponse:
        if self._context.draining:
            raise NotReady("the gateway is draining: it finishes open requests and takes no new ones")
        # A fleet that is scaled to zero is ready: what comes is held until a replica is.
        if not (self._context.autoscalers or any(replica.is_up for replica in self._context.pool)):
            raise NotReady("no replica is ready")
        return _json(Health("ready"))

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        body, content_type = self._context.metrics.exposition(request.headers.get("accept", ""))
        return web.Response(body=body, headers={"content-type": content_type})

    def admin_only(self, handler: Handler, *, needs_keys: bool = False) -> Handler:
        """Guard a handler. With `needs_keys` nobody gets in where there are no keys at all."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            if needs_keys and self._context.ring.is_open:
                raise RouteNotFound(
                    "without API keys the admin routes are on a Unix socket only: --admin-listen unix:PATH"
                )
            if not self._identify(request).terms.admin:
                raise NotPermitted("this route needs an API key with admin = true")
            return await handler(request)

        return guarded

    def _identify(self, request: web.Request) -> Caller:
        if self._context.ring.is_open:
            own_address = self._context.connections.own_address(request.transport)
            check_open_call(request.method, request.headers, own_address)
        caller = self._context.ring.identify(request.headers.get("authorization"))
        request[RECORD].tenant = caller.tenant
        return caller

    def _check_model(self, asked: str, model: str, caller: Caller) -> None:
        if self._may_use(asked, model, caller):
            return
        raise UnusableAlias(asked) if caller.may_use(asked) else UnknownModel(asked, self._names_for(caller))

    def _may_use(self, name: str, model: str, caller: Caller) -> bool:
        """Whether a caller may use a model by this name: where its key has no more than an alias, its replicas too."""
        if caller.may_use(model):
            return True
        heeds = self._context.introductions.heeds_asked_name
        return caller.may_use(name) and all(heeds(replica) for replica in self._context.pool.serving(model))

    def _names_for(self, caller: Caller) -> list[str]:
        # What is declared is waited for, and started where an autoscaler does that: nobody need serve it now.
        served = {*self._context.pool.models(), *self._context.config.declared_models}
        aliases = {alias: model for alias, model in self._context.config.aliases.items() if model in served}
        named = {**{name: name for name in served}, **aliases}
        return sorted(name for name, model in named.items() if self._may_use(name, model, caller))

    def _describe(self, name: str) -> Model:
        model = self._context.pool.models().get(self._context.config.aliases.get(name, name))
        limit = model.max_context_tokens if model is not None else None
        return Model(id=name, created=0, max_context_tokens=limit)


def _front_door(context: GatewayContext) -> Middleware:
    @web.middleware
    async def front_door(request: web.Request, handler: Handler) -> web.StreamResponse:
        record = _open_record(request)
        request[RECORD] = record
        try:
            with context.open_requests:
                response = await _answered_while_open(request, handler, context.open_requests)
            record.status = response.status
            if not (response.prepared or request.content.is_eof()):
                response.force_close()  # the rest of the request would stand before the next
            return response
        except (ClientGone, asyncio.CancelledError):
            record.finish, record.status = "abort", _GONE_STATUS
            # What the framework itself raises then: it closes the connection and says nothing.
            raise asyncio.CancelledError from None
        finally:
            context.connections.note_answered(request.transport, is_read=request.content.is_eof())
            record.total_seconds = time.monotonic() - record.arrival
            if not (record.path in _QUIET_ROUTES or record.path.startswith(_ADMIN_PREFIX)):
                # Names of models that nobody serves would be labels without number.
                known = record.model if context.pool.serving(record.model) else ""
                context.metrics.requests.labels(known, str(record.status)).inc()
            if record.route not in _QUIET_ROUTES:
                log_request(record)

    return front_door


async def _answered_while_open(request: web.Request, handler: Handler, requests: OpenRequests) -> web.StreamResponse:
    """Run a handler; a caller whose answer the drain has cut short is told so."""
    try:
        return await _whole(request, await _answered(request, handler))
    except asyncio.CancelledError:
        if not requests.is_over:
            raise
        ended = _error(request, EngineUnavailable("the gateway was ended before the answer was; send it again"))
        return await _whole(request, ended)


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Run a handler; what it raises becomes an error of the catalogue."""
    if request.version.major != 1:
        return Refusal(RequestError("this port speaks HTTP/1.1 and HTTP/1.0: send the request in one of them"))
    try:
        check_host(f"1.{request.version.minor}", len(request.headers.getall("host", ())))
        return await handler(request)
    except PenstockError as error:
        return _error(request, error)
    except web.HTTPException as error:
        return _error(request, _own_error(request, error))
    except (ClientGone, asyncio.CancelledError):
        raise
    except Exception as error:
        _logger.exception("unexpected failure (request %s)", request[RECORD].request_id)
        return _error(request, error)


async def _whole(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Return the response that has begun: what came instead of its rest is said there, and not as one of its own."""
    begun: Downstream | None = request.get(BEGUN)
    if begun is None or begun.response is response:
        return response
    body = response.body if isinstance(response, web.Response) else None
    await begun.fail(body if isinstance(body, bytes) else b"{}")
    return begun.response


def _own_error(request: web.Request, error: web.HTTPException) -> RequestError:
    method, path = request.method[:20], request.path[:200]
    if error.status == 404:
        return RouteNotFound(f"there is no {path!r} here")
    if error.status == 405:
        return MethodNotAllowed(f"{method!r} is not possible on {path!r}")
    return RequestError("the request could not be understood")


def _open_record(request: web.Request) -> RequestRecord:
    given = request.headers.get("x-request-id", "")
    resource = request.match_info.route.resource
    return RequestRecord(
        request_id=given if given and _REQUEST_ID.fullmatch(given) else f"{random.getrandbits(128):032x}",
        method=request.method,
        path=request.path[:200],
        arrival=time.monotonic(),
        route=resource.canonical if resource is not None else "unmatched",
    )


def _error(request: web.Request, error: Exception) -> web.Response:
    reply = reply_for(error)
    record = request[RECORD]
    record.error_code = reply.code
    headers = {**reply.headers, "content-type": "application/json", "x-request-id": record.request_id}
    return web.Response(status=reply.status, body=reply.body, headers=headers)


def _json(document: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), headers={"content-type": "application/json"})
