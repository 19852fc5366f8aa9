"""Who calls and on what terms: the data that keys, quotas, the server and the gateway pass to each other.

Plain structs and the checks of their values. Knows nothing of where keys are stored or how limits are kept.
"""

import math
import re
from typing import Any

import msgspec

from penstock.errors import InvalidParameter
from penstock.request import MAX_PRIORITY, NO_TARGETS, Targets

# Whom requests count for where no keys are used: no key can have this name.
OPEN_TENANT = "open"

# Of a tenant's share of a busy engine. What is served is counted in parts of it, so it must not be any number.
LEAST_WEIGHT, LARGEST_WEIGHT = 0.001, 1000.0
# After a rotation, how long the old secret may go on to open the key: a secret that is to be replaced has to end.
MAX_OVERLAP_SECONDS = 30 * 24 * 3600
# Whom a gateway's copies of requests count for, which it marks with this header: no key can have this name.
SHADOW_TENANT = "(shadow)"
SHADOW_HEADER = "x-penstock-shadow"

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PATH_STEPS = (".", "..")  # which clients leave out of a path such as /admin/keys/{name}


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a tenant may use. None: as much as there is."""

    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None  # input and output together; days are UTC's
    longest_context: int | None = None  # prompt and answer of one request, in tokens

    @property
    def are_metered(self) -> bool:
        """Whether any limit depends on what was used before. The longest context does not."""
        return any(
            limit is not None
            for limit in (
                self.requests_per_minute,
                self.input_tokens_per_minute,
                self.output_tokens_per_minute,
                self.concurrent_requests,
                self.tokens_per_day,
            )
        )


class KeyTerms(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a key is worth."""

    admin: bool = False  # also opens admin routes
    weight: float = 1.0  # share of a busy engine, against other tenants'
    # Of its requests, and the highest they may ask for; larger runs earlier. None: a key's is 0, an open server has no
    # highest.
    priority: int | None = None
    models: tuple[str, ...] | None = None  # the only ones it may use; None: all
    limits: Limits = Limits()
    # Where its requests name none, and the least time per token that they may ask for.
    targets: Targets = NO_TARGETS

    @property
    def are_open(self) -> bool:
        """Whether they are those of a server without keys, where one tenant's requests may ask for anything."""
        return self.priority is None


class ApiKey(msgspec.Struct, frozen=True, omit_defaults=True):
    """One secret, known by its digest. Its name is the tenant that its requests count for."""

    name: str
    sha256: str
    terms: KeyTerms = KeyTerms()
    expires_at: float | None = None  # Unix time; the old secret of a rotated key


class Voucher(msgspec.Struct, frozen=True):
    """What a gateway on the same store says of a request that it passes on."""

    asked_model: str  # as the caller named it, before the gateway's aliases
    lease: str | None = None  # that the server which had it before holds for it


class Caller(msgspec.Struct, frozen=True):
    """Who sent a request, and on what terms."""

    tenant: str
    terms: KeyTerms = KeyTerms()
    voucher: Voucher | None = None  # of the gateway that passed the request on, where it is one of ours

    def may_use(self, model: str) -> bool:
        return self.terms.models is None or model in self.terms.models


class StoredKey(msgspec.Struct, frozen=True):
    """One key as it may be shown: without its secrets."""

    name: str
    terms: KeyTerms
    created_at: float
    revoked_at: float | None
    num_secrets: int  # that open it now; two while an old one runs out after a rotation


class Usage(msgspec.Struct, kw_only=True):
    """Counts of one tenant, model and day."""

    tenant: str
    model: str
    day: str  # 2026-01-31
    requests: int = 0  # answered, at least in part
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt tokens, those that were in the prefix cache
    output_tokens: int = 0
    refused: int = 0  # for a limit or a full queue
    errors: int = 0  # the server's own


def check_name(name: Any) -> str | None:
    """Return what is wrong with a key's name, or None."""
    if name == OPEN_TENANT:
        return f"needs another name: {OPEN_TENANT!r} is whom requests count for where there are no keys"
    if name in _PATH_STEPS:
        return "needs another name: as a part of a URL this one leads elsewhere"
    if isinstance(name, str) and _NAME.fullmatch(name):
        return None
    return "needs a name of up to 64 letters, digits, '.', '_' or '-'"


def check_weight(weight: float) -> None:
    """Raise InvalidParameter for a weight with which shares could not be told apart."""
    if not LEAST_WEIGHT <= weight <= LARGEST_WEIGHT:
        raise InvalidParameter("weight", weight, f"give a number from {LEAST_WEIGHT:g} to {LARGEST_WEIGHT:g}")


def check_terms(terms: KeyTerms) -> None:
    """Raise InvalidParameter for the first of terms of the right types that cannot be kept."""
    check_weight(terms.weight)
    if terms.priority is not None and abs(terms.priority) > MAX_PRIORITY:
        raise InvalidParameter("priority", terms.priority, f"give an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}")
    if terms.models is not None and not terms.models:
        raise InvalidParameter("models", [], "name at least one, or leave it out")
    if not all(name.strip() for name in terms.models or ()):
        raise InvalidParameter("models", list(terms.models or ()), "give each of them a name")
    for group, struct in (("limits", terms.limits), ("targets", terms.targets)):
        for field in struct.__struct_fields__:
            value = getattr(struct, field)
            if value is not None and not (math.isfinite(value) and 0 < value < 2**53):
                raise InvalidParameter(f"{group}.{field}", value, "give a number over 0 and under 2**53")


def read_terms(document: dict[str, Any]) -> KeyTerms:
    """Return the terms that a document of plain values states. Raises ValueError with the reason."""
    targets = document.get("targets", {})
    if isinstance(targets, dict) and not set(targets) <= set(Targets.__struct_fields__):
        raise ValueError(f"targets may hold {', '.join(Targets.__struct_fields__)} only")
    try:
        terms = msgspec.convert(document, KeyTerms)
        check_terms(terms)
    except (msgspec.ValidationError, InvalidParameter) as error:
        raise ValueError(str(error)) from None
    return terms
