"""A struct as an HTTP response."""

from collections.abc import Mapping

import msgspec
from starlette.responses import Response


def json_response(body: msgspec.Struct, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json", headers=headers)
