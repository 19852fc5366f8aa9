"""/openapi.json: the API, for programs."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.endpoint import Access, Endpoint


def endpoints(document: dict[str, Any]) -> list[Endpoint]:
    body = msgspec.json.encode(document)

    async def show(request: Request) -> Response:
        return Response(body, media_type="application/json")

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
