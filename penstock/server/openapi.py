"""The OpenAPI document of the routes, from what each endpoint says it takes and gives."""

import re
from typing import Any

import msgspec
from pydantic.json_schema import models_json_schema

from penstock import __version__
from penstock.protocol.errors import ErrorResponse
from penstock.server.endpoint import Access, Endpoint

_TEMPLATE = "#/components/schemas/{name}"


def build_document(endpoints: list[Endpoint]) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document."""
    shown = [endpoint for endpoint in endpoints if endpoint.in_document]
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in shown:
        paths.setdefault(endpoint.path.replace(":path}", "}"), {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Penstock",
            "version": __version__,
            "description": "An OpenAI-compatible API. Every error has the shape of `ErrorResponse`.",
        },
        "paths": paths,
        "components": {
            "schemas": _schemas(shown),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": f"{endpoint.method.lower()}{endpoint.path.replace('/', '_').replace(':path', '')}",
        "summary": endpoint.summary,
        "tags": [endpoint.tag],
        "x-access": str(endpoint.access),
        "responses": {
            "200": {"description": "Done", "content": _content(endpoint)},
            "default": {
                "description": "An error of the catalogue",
                "content": {"application/json": {"schema": _reference(ErrorResponse)}},
            },
        },
    }
    if endpoint.access is not Access.PUBLIC:
        operation["security"] = [{"key": []}]
    places = [("path", name) for name in re.findall(r"{(\w+)", endpoint.path)]
    places += [("query", name) for name in endpoint.query or ()]
    if places:
        operation["parameters"] = [
            {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}
            for place, name in places
        ]
    if endpoint.takes is not None:
        content: dict[str, Any] = {"application/json": {"schema": _reference(endpoint.takes)}}
        operation["requestBody"] = {"required": endpoint.takes.has_required_fields(), "content": content}
    if endpoint.form is not None:
        content = {"multipart/form-data": {"schema": dict(endpoint.form)}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _content(endpoint: Endpoint) -> dict[str, Any]:
    if isinstance(endpoint.gives, str):
        return {endpoint.gives: {}}
    content: dict[str, Any] = {"application/json": {"schema": _reference(endpoint.gives)}}
    if endpoint.streams is not None:
        content["text/event-stream"] = {"schema": _reference(endpoint.streams)}
    return content


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": _TEMPLATE.format(name=kind.__name__)}


def _schemas(endpoints: list[Endpoint]) -> dict[str, Any]:
    taken = [endpoint.takes for endpoint in endpoints if endpoint.takes is not None]
    given: list[type] = [ErrorResponse]
    for endpoint in endpoints:
        given += [kind for kind in (endpoint.gives, endpoint.streams) if isinstance(kind, type)]
    _, requests = models_json_schema(
        [(kind, "validation") for kind in taken], ref_template=_TEMPLATE.replace("name", "model")
    )
    _, responses = msgspec.json.schema_components(given, ref_template=_TEMPLATE)
    return dict(sorted({**requests.get("$defs", {}), **responses}.items()))
