"""/block_events: which blocks the cache holds, for gateways that route by them."""

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from penstock.errors import EngineUnavailable
from penstock.protocol.block_events import BLOCK_EVENTS_PATH
from penstock.server.context import ServerContext
from penstock.server.endpoint import Access, Endpoint

_MEDIA_TYPE = "application/octet-stream"


def endpoints(context: ServerContext) -> list[Endpoint]:
    async def listen(request: Request) -> Response:
        if not context.engine.connected or context.answers.draining:
            raise EngineUnavailable("there is no engine to listen to now; try again in a few seconds")
        return StreamingResponse(context.blocks.messages(), media_type=_MEDIA_TYPE)

    return [
        Endpoint(
            method="GET",
            path=BLOCK_EVENTS_PATH,
            handler=listen,
            access=Access.ADMIN,
            summary="Blocks of the KV cache as they come and go: a snapshot, then numbered changes, without an end",
            tag="Operations",
            gives=_MEDIA_TYPE,
        )
    ]
