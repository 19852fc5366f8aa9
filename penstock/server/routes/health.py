"""/live and /ready: for whoever restarts processes and whoever sends them work."""

from starlette.requests import Request
from starlette.responses import Response

from penstock.protocol.health import Health
from penstock.protocol.identity import IDENTITY_HEADER, Identity, encode_identity
from penstock.server.context import ServerContext
from penstock.server.endpoint import Access, Endpoint
from penstock.server.json_response import json_response


def endpoints(context: ServerContext) -> list[Endpoint]:
    async def live(request: Request) -> Response:
        return json_response(Health("live"))

    async def ready(request: Request) -> Response:
        context.readiness.check()
        tenancy = context.tenancy
        identity = Identity(role="server", store=tenancy.store_identity, has_keys=not tenancy.ring.is_open)
        return json_response(Health("ready"), {IDENTITY_HEADER: encode_identity(identity)})

    return [
        Endpoint(
            method="GET",
            path="/live",
            handler=live,
            access=Access.PUBLIC,
            summary="200 while this process runs",
            tag="Operations",
            gives=Health,
        ),
        Endpoint(
            method="GET",
            path="/ready",
            handler=ready,
            access=Access.PUBLIC,
            summary="200 while work sent here would be done, else 503 with the reason",
            tag="Operations",
            gives=Health,
        ),
    ]
