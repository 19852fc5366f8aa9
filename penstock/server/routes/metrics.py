"""/metrics: the numbers that docs/metrics.md explains."""

from starlette.requests import Request
from starlette.responses import Response

from penstock.server.context import ServerContext
from penstock.server.endpoint import Access, Endpoint


def endpoints(context: ServerContext) -> list[Endpoint]:
    async def scrape(request: Request) -> Response:
        body, content_type = context.metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    return [
        Endpoint(
            method="GET",
            path="/metrics",
            handler=scrape,
            access=Access.ADMIN,
            summary="Metrics in Prometheus's text format",
            tag="Operations",
            gives="text/plain",
        )
    ]
