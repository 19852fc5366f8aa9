"""The wire types of the admin routes: keys and usage."""

from typing import ClassVar

import msgspec
from pydantic import Field

from penstock.protocol.wire import WireModel
from penstock.request import Targets
from penstock.tenants import MAX_OVERLAP_SECONDS, KeyTerms, Limits, StoredKey, Usage, check_terms


class AdminModel(WireModel):
    """What comes to the admin socket, which has no pages."""

    GUIDE: ClassVar[str] = "/openapi.json"


class KeyLimits(AdminModel):
    """What the key's tenant may use; absent: as much as there is."""

    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None
    longest_context: int | None = None


class KeyTargets(AdminModel):
    """What the key's requests aim for where they do not say so, and the least time per token they may ask for."""

    ttft_seconds: float | None = None
    time_per_token_seconds: float | None = None
    deadline_seconds: float | None = None


class KeyRequest(AdminModel):
    """A key to be made."""

    name: str = Field(description="The tenant that its requests count for")
    admin: bool = False
    weight: float = 1.0
    priority: int | None = None
    models: list[str] | None = Field(None, fail_fast=True, description="The only models it may use; default: all")
    limits: KeyLimits = KeyLimits()
    targets: KeyTargets = KeyTargets()

    def terms(self) -> KeyTerms:
        terms = KeyTerms(
            admin=self.admin,
            weight=self.weight,
            priority=self.priority,
            models=None if self.models is None else tuple(self.models),
            limits=Limits(**self.limits.model_dump()),
            targets=Targets(**self.targets.model_dump()),
        )
        check_terms(terms)
        return terms


class RotateRequest(AdminModel):
    overlap_seconds: float = Field(
        0.0, ge=0, le=MAX_OVERLAP_SECONDS, description="How long the old secret opens the key as well"
    )


class NewSecret(msgspec.Struct, frozen=True):
    """A key's secret, told this once."""

    name: str
    secret: str


class RevokedKey(msgspec.Struct, frozen=True):
    name: str
    revoked: bool = True


class KeyList(msgspec.Struct, frozen=True):
    data: list[StoredKey]


class UsageList(msgspec.Struct, frozen=True):
    data: list[Usage]
