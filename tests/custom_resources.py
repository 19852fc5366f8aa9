"""Checks manifests as strictly as a cluster can: Kubernetes' own kinds and custom ones, no field that is not known."""

import json
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jsonschema
import kubernetes_validate
from kubernetes_validate import utils

FOLDER = Path(__file__).parent / "data" / "crds"
OLDEST, NEWEST = "1.30", "1.37"  # the versions of Kubernetes that manifests are made for


# A megabyte of definitions, which the package reads again for each manifest.
_contents = cache(utils.schema_contents)


class InvalidManifest(Exception):
    """A cluster would refuse it."""


def check(manifest: dict[str, Any], version: str = NEWEST) -> None:
    """Raise InvalidManifest unless a cluster of this version would take the manifest without dropping a field."""
    try:
        if is_custom(manifest):
            jsonschema.Draft202012Validator(_schema(_file(manifest))).validate(manifest)
            # Its metadata is everybody's.
            manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": manifest["metadata"]}
        with patch.object(utils, "schema_contents", _contents):
            kubernetes_validate.validate(manifest, version, strict=True)
    except jsonschema.ValidationError as error:
        raise InvalidManifest(f"{'.'.join(map(str, error.absolute_path))}: {error.message[:300]}") from error


def is_custom(manifest: dict[str, Any]) -> bool:
    return _file(manifest).exists()


def _file(manifest: dict[str, Any]) -> Path:
    group, _, version = manifest["apiVersion"].rpartition("/")
    return FOLDER / f"{manifest['kind']}.{group}.{version}.json"


@cache
def _schema(file: Path) -> dict[str, Any]:
    schema = json.loads(file.read_text())
    schema["properties"]["metadata"] = {"type": "object"}
    schema["required"] = sorted({*schema.get("required", ()), "apiVersion", "kind", "metadata", "spec"})
    return _closed(schema)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with every object closed to fields that it does not name."""
    made = dict(schema)
    if "properties" in schema:
        made["properties"] = {name: _closed(part) for name, part in schema["properties"].items()}
        if "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            made[name] = _closed(schema[name])
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    return made
