"""API keys: who a caller is, and what they may open.

Keys are known only by their SHA-256 and compared in constant time. Without keys the server is open, which
`server.config` allows on loopback addresses only. Knows nothing of HTTP beyond the Authorization header's text.
"""

import hashlib
import hmac
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import ConfigError, NotAuthenticated

_EXAMPLE = '[[keys]] with name = "alice" and sha256 = the output of: printf %s "$KEY" | sha256sum'

# Whom requests count for where no keys are used.
OPEN_TENANT = "open"


class ApiKey(msgspec.Struct, frozen=True):
    """One key. Its name is the tenant that its requests count for."""

    name: str
    sha256: str
    admin: bool = False


class Caller(msgspec.Struct, frozen=True):
    tenant: str
    admin: bool


class KeyRing:
    """The keys of this server; an empty ring means that anyone may call."""

    def __init__(self, keys: tuple[ApiKey, ...]) -> None:
        self._keys = tuple((bytes.fromhex(key.sha256), Caller(key.name, key.admin)) for key in keys)

    @property
    def is_open(self) -> bool:
        return not self._keys

    def identify(self, authorization: str | None) -> Caller:
        """Return who sent this Authorization header. Raises NotAuthenticated."""
        if self.is_open:
            return Caller(OPEN_TENANT, admin=True)
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise NotAuthenticated("an API key is needed: send the header 'Authorization: Bearer KEY'")
        digest = hashlib.sha256(key.strip().encode()).digest()
        found: Caller | None = None
        for known, caller in self._keys:  # all of them, whichever matches: the time taken tells nothing
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None:
            raise NotAuthenticated("this API key is not known here")
        return found


def load_keys(path: str) -> tuple[ApiKey, ...]:
    """Read a keys file. Raises ConfigError that says which entry is wrong and why."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("--keys", path, f"it cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("--keys", path, f"it is not valid TOML: {error}") from error
    entries = document.get("keys")
    if not isinstance(entries, list) or not entries or set(document) != {"keys"}:
        raise ConfigError("--keys", path, f"give at least one entry: {_EXAMPLE}")
    keys = tuple(_read_key(path, number, entry) for number, entry in enumerate(entries, start=1))
    for field in ("name", "sha256"):
        if len({getattr(key, field) for key in keys}) != len(keys):
            raise ConfigError("--keys", path, f"two entries have the same {field}; each must differ")
    return keys


def _read_key(path: str, number: int, entry: Any) -> ApiKey:
    if not isinstance(entry, dict) or not set(entry) <= {"name", "sha256", "admin"}:
        raise ConfigError("--keys", path, f"entry {number} may hold name, sha256 and admin only")
    name, digest, admin = entry.get("name"), entry.get("sha256"), entry.get("admin", False)
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise ConfigError("--keys", path, f"entry {number} needs a name of up to 64 letters, digits, '.', '_' or '-'")
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", digest):
        raise ConfigError("--keys", path, f"entry {number} ({name}) needs sha256, 64 hexadecimal digits: {_EXAMPLE}")
    if not isinstance(admin, bool):
        raise ConfigError("--keys", path, f"entry {number} ({name}): admin must be true or false")
    return ApiKey(name, digest.lower(), admin)
