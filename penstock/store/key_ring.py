"""API keys: who a caller is, and on what terms.

Keys are known only by their SHA-256 and compared in constant time. Without keys the server is open, which
the server allows on loopback addresses only. Knows nothing of HTTP beyond the Authorization header's text.
"""

import hashlib
import hmac
import re
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import ConfigError, NotAuthenticated
from penstock.tenants import OPEN_TENANT, ApiKey, Caller, KeyTerms, check_name, read_terms

_EXAMPLE = '[[keys]] with name = "alice" and sha256 = the output of: printf %s "$KEY" | sha256sum'
# By so much of their digest keys are looked up; who guesses digests learns nothing of a key from the time it takes.
_PREFIX_BYTES = 8
_NO_KEY_YET = (
    "an admin key is needed here, and there is no key yet: make one with 'penstock keys create NAME --admin', "
    "or on a Unix socket, where none is needed"
)
_ANYONE = Caller(OPEN_TENANT, KeyTerms(admin=True))


class KeyRing:
    """The keys of this server, as they are at the moment; a ring without keys that needs none is open to anyone."""

    def __init__(
        self, keys: tuple[ApiKey, ...], *, needs_keys: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._known: dict[bytes, list[tuple[bytes, ApiKey, Caller]]] = {}
        self.is_open = False
        self.replace(keys, needs_keys=needs_keys)

    def replace(self, keys: tuple[ApiKey, ...], *, needs_keys: bool) -> None:
        """Take these keys for the ones before."""
        known: dict[bytes, list[tuple[bytes, ApiKey, Caller]]] = {}
        for key in keys:
            digest = bytes.fromhex(key.sha256)
            known.setdefault(digest[:_PREFIX_BYTES], []).append((digest, key, _caller_of(key)))
        self._known = known
        self.is_open = not keys and not needs_keys

    def caller_named(self, tenant: str) -> Caller | None:
        """Return a tenant's caller as its key is now; None: no key in force has this name."""
        if tenant == OPEN_TENANT:
            return Caller(OPEN_TENANT) if self.is_open else None  # what it left behind waits for an open server
        now = self._clock()
        for known in self._known.values():
            for _, key, caller in known:
                if caller.tenant == tenant and (key.expires_at is None or now < key.expires_at):
                    return caller
        return None

    def identify(self, authorization: str | None, *, needs_key: bool = False) -> Caller:
        """Return who sent this Authorization header. Raises NotAuthenticated, with `needs_key` while open too."""
        if self.is_open:
            if needs_key:
                raise NotAuthenticated(_NO_KEY_YET)
            return _ANYONE
        scheme, _, secret = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise NotAuthenticated("an API key is needed: send the header 'Authorization: Bearer KEY'")
        digest = hashlib.sha256(secret.strip().encode()).digest()
        found: Caller | None = None
        for known, key, caller in self._known.get(digest[:_PREFIX_BYTES], ()):
            if hmac.compare_digest(known, digest) and (key.expires_at is None or self._clock() < key.expires_at):
                found = caller
        if found is None:
            raise NotAuthenticated("this API key is not known here")
        return found


def _caller_of(key: ApiKey) -> Caller:
    """Return who a key's requests come from. Who was granted no priority asks for none above the others'."""
    priority = key.terms.priority or 0
    return Caller(key.name, msgspec.structs.replace(key.terms, priority=priority))


def load_keys(path: str) -> tuple[ApiKey, ...]:
    """Read a keys file to start with. Raises ConfigError that says which entry is wrong and why, or that none is."""
    keys = read_keys(path)
    if not keys:
        raise ConfigError("--keys", path, f"give at least one entry: {_EXAMPLE}")
    return keys


def read_keys(path: str) -> tuple[ApiKey, ...]:
    """Return the keys of a file, which may have none. Raises ConfigError that says which entry is wrong and why."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("--keys", path, f"it cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("--keys", path, f"it is not valid TOML: {error}") from error
    entries = document.get("keys", [])
    if not isinstance(entries, list) or not set(document) <= {"keys"}:
        raise ConfigError("--keys", path, f"it may hold entries of keys only: {_EXAMPLE}")
    keys = tuple(_read_key(path, number, entry) for number, entry in enumerate(entries, start=1))
    for field in ("name", "sha256"):
        if len({getattr(key, field) for key in keys}) != len(keys):
            raise ConfigError("--keys", path, f"two entries have the same {field}; each must differ")
    return keys


def _read_key(path: str, number: int, entry: Any) -> ApiKey:
    if not isinstance(entry, dict):
        raise ConfigError("--keys", path, f"entry {number} must be a table: {_EXAMPLE}")
    terms = dict(entry)
    name, digest = terms.pop("name", None), terms.pop("sha256", None)
    wrong = check_name(name)
    if wrong is not None:
        raise ConfigError("--keys", path, f"entry {number} {wrong}")
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", digest):
        raise ConfigError("--keys", path, f"entry {number} ({name}) needs sha256, 64 hexadecimal digits: {_EXAMPLE}")
    try:
        return ApiKey(str(name), digest.lower(), read_terms(terms))
    except ValueError as error:
        raise ConfigError("--keys", path, f"entry {number} ({name}): {error}") from None
