"""The OpenAI API's own published schema, as a judge of our responses."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

SCHEMA_FILE = Path(__file__).parents[4] / "shared" / "data" / "openai_openapi.json"
_NAME = "urn:openai"


def check(kind: str, document: Any) -> None:
    """Fail unless the document is a valid `kind`. Skips, saying so, where the schema is absent."""
    error = next(_validator(kind).iter_errors(document), None)
    assert error is None, f"not a {kind}: {error}"


@functools.cache
def _validator(kind: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"{_NAME}#/components/schemas/{kind}"}, registry=_registry())


@functools.cache
def _registry() -> Registry[Any]:
    if not SCHEMA_FILE.exists():
        pytest.skip("the OpenAI schema (../shared/data/openai_openapi.json) is not here")
    schema = _plain(json.loads(SCHEMA_FILE.read_text()))
    return Registry().with_resource(_NAME, Resource(contents=schema, specification=DRAFT202012))


def _plain(node: Any) -> Any:
    """Turn OpenAPI's `nullable`, which JSON Schema does not know, into a choice with null."""
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, dict):
        return node
    plain = {name: _plain(value) for name, value in node.items() if name != "nullable"}
    return {"anyOf": [plain, {"type": "null"}]} if node.get("nullable") is True else plain
