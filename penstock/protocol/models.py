"""The wire types of /v1/models."""

from typing import Literal

import msgspec


class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "penstock"
    max_context_tokens: int | None  # null until the engine is ready


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]
