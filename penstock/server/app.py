"""The HTTP app: the routes, in one place, behind one door.

Adding an endpoint is one file in `routes/` and one line in `ROUTES`, or in `ADMIN_ROUTES` for the admin socket, which
has an app of its own. Knows nothing of processes and sockets: that is `server.worker`'s.
"""

import functools

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock import __version__
from penstock.errors import BodyTooLarge, MethodNotAllowed, PenstockError, RequestError, RouteNotFound
from penstock.protocol.errors import reply_for
from penstock.server.context import ServerContext
from penstock.server.endpoint import Endpoint, GuardedHandler, check_access, record_of
from penstock.server.front_door import FrontDoor
from penstock.server.routes import (
    admin_keys,
    admin_usage,
    batches,
    block_events,
    chat,
    completions,
    document,
    files,
    health,
    home,
    metrics,
    models,
    tokenize,
)
from penstock.store.key_ring import KeyRing

ROUTES = (chat, completions, files, batches, models, tokenize, health, metrics, block_events, home)
ADMIN_ROUTES = (admin_keys, admin_usage)


def create_app(context: ServerContext) -> FastAPI:
    """Return the app of one API worker. Raises if a route does not declare who may call it."""
    endpoints = [endpoint for module in ROUTES for endpoint in module.endpoints(context)]
    return _assemble(context, endpoints, context.tenancy.ring, guide="/docs")


def create_admin_app(context: ServerContext, *, needs_key: bool) -> FastAPI:
    """Return the app of the admin socket. Without `needs_key`, who can open the socket may do everything there.

    With it nobody gets in before there is a key.
    """
    endpoints = [endpoint for module in ADMIN_ROUTES for endpoint in module.endpoints(context)]
    keys = context.tenancy.ring if needs_key else KeyRing(())
    return _assemble(context, endpoints, keys, guide="/openapi.json", needs_key=needs_key)


def _assemble(
    context: ServerContext, endpoints: list[Endpoint], keys: KeyRing, *, guide: str, needs_key: bool = False
) -> FastAPI:
    """Return an app of these endpoints. `guide` is the path where callers can read what there is."""
    endpoints += document.endpoints(list(endpoints))
    app = FastAPI(
        title="Penstock", version=__version__, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    for endpoint in endpoints:
        app.add_api_route(
            endpoint.path,
            GuardedHandler(endpoint, keys, context.tenancy.fleet_secret, needs_key=needs_key),
            methods=["GET", "HEAD"] if endpoint.method == "GET" else [endpoint.method],
            response_model=None,
            name=endpoint.path,
            include_in_schema=False,
        )
    check_access(app.routes)
    app.add_exception_handler(PenstockError, _answer_error)
    app.add_exception_handler(HTTPException, functools.partial(_answer_http_exception, guide=guide))
    app.add_middleware(FrontDoor, metrics=context.metrics)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    reply = reply_for(error)
    record_of(request).error_code = reply.code
    headers = dict(reply.headers)
    if isinstance(error, BodyTooLarge):
        headers["connection"] = "close"  # or the rest of the body would have to be read
    return Response(reply.body, reply.status, headers=headers, media_type="application/json")


async def _answer_http_exception(request: Request, error: Exception, *, guide: str) -> Response:
    """Give the framework's own refusals the shape of ours."""
    assert isinstance(error, HTTPException)
    method, path = request.method[:20], request.url.path[:200]
    if error.status_code == 404:
        own: RequestError = RouteNotFound(f"there is no {path!r} here; see {guide} for what there is")
    elif error.status_code == 405:
        # The path was found, so the router has noted whose it is.
        record_of(request).route = request.scope["endpoint"].endpoint.path
        own = MethodNotAllowed(f"{method!r} is not possible on {path!r}; see {guide} for what is")
    else:
        own = RequestError("the request could not be understood")
    response = await _answer_error(request, own)
    response.headers.update(error.headers or {})
    return response
