"""/openapi.json: the API, for programs."""

import functools

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.endpoint import Access, Endpoint
from penstock.server.openapi import build_document


def endpoints(described: list[Endpoint]) -> list[Endpoint]:
    @functools.cache
    def body() -> bytes:
        """Built when first asked for: the schemas take longer than the rest of a worker's start."""
        return msgspec.json.encode(build_document(described))

    async def show(request: Request) -> Response:
        return Response(body(), media_type="application/json")

    return [
        Endpoint(
            method="GET",
            path="/openapi.json",
            handler=show,
            access=Access.PUBLIC,
            summary="The API as an OpenAPI document",
            tag="Pages",
            in_document=False,
        )
    ]
