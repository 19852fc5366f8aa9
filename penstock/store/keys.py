"""The keys in the store: made, listed, replaced and taken back.

A secret is 256 random bits, shown once and kept as its SHA-256. Knows nothing of who asks or of HTTP.
"""

import hashlib
import secrets as random_secrets

import msgspec
from sqlalchemy import Connection, Row, delete, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from penstock.errors import KeyNotFound, RequestError
from penstock.store.database import Database
from penstock.store.schema import keys, secrets, state
from penstock.tenants import OPEN_TENANT, ApiKey, KeyTerms, StoredKey, check_name, check_terms

_PREFIX = "psk-"


class KeyStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, name: str, terms: KeyTerms) -> str:
        """Add a key and return its secret, which nobody can tell again."""
        wrong = check_name(name)
        if wrong is not None:
            raise RequestError(f"the key {wrong}", param="name")
        check_terms(terms)
        with self._database.writing() as connection:
            if connection.execute(select(keys.c.name).where(keys.c.name == name)).first() is not None:
                raise _name_taken(name)
            now = self._database.now(connection)
            encoded = msgspec.json.encode(terms).decode()
            try:
                connection.execute(insert(keys).values(name=name, terms=encoded, created_at=now))
            except IntegrityError:  # somebody else has made it since we looked
                raise _name_taken(name) from None
            return _add_secret(connection, name, now)

    def rotate(self, name: str, *, overlap_seconds: float = 0.0) -> str:
        """Give a key a new secret and return it; the old ones open it for `overlap_seconds` more."""
        with self._database.writing() as connection:
            _find(connection, name)
            now = self._database.now(connection)
            _drop_expired(connection, now)
            ends = now + max(0.0, overlap_seconds)
            later = or_(secrets.c.expires_at.is_(None), secrets.c.expires_at > ends)
            connection.execute(update(secrets).where(secrets.c.name == name, later).values(expires_at=ends))
            return _add_secret(connection, name, now)

    def revoke(self, name: str) -> None:
        """End a key: none of its secrets opens anything."""
        with self._database.writing() as connection:
            _find(connection, name)
            connection.execute(delete(secrets).where(secrets.c.name == name))
            now = self._database.now(connection)
            connection.execute(update(keys).where(keys.c.name == name).values(revoked_at=now))
            _note_change(connection)

    def list(self) -> list[StoredKey]:
        """Return all keys, revoked ones too, by name."""
        with self._database.reading() as connection:
            now = self._database.now(connection)
            live = or_(secrets.c.expires_at.is_(None), secrets.c.expires_at > now)
            counted = (
                select(keys, func.count(secrets.c.sha256).label("num_secrets"))
                .select_from(keys.outerjoin(secrets, (secrets.c.name == keys.c.name) & live))
                .group_by(*keys.c)
                .order_by(keys.c.name)
            )
            return [_stored(row) for row in connection.execute(counted)]

    def version(self) -> int:
        """Return a number that changes with every change of keys."""
        with self._database.reading() as connection:
            return int(connection.execute(select(state.c.keys_version)).scalar_one())

    def load(self) -> tuple[ApiKey, ...]:
        """Return every secret that opens something. A key that was named as the open tenant is opens nothing."""
        joined = select(secrets.c.sha256, secrets.c.expires_at, keys.c.name, keys.c.terms).join_from(secrets, keys)
        joined = joined.where(keys.c.name != OPEN_TENANT)
        with self._database.reading() as connection:
            return tuple(
                ApiKey(row.name, row.sha256, msgspec.json.decode(row.terms, type=KeyTerms), row.expires_at)
                for row in connection.execute(joined.order_by(secrets.c.sha256))
            )

    def had_any(self) -> bool:
        """Whether there is or ever was a key."""
        with self._database.reading() as connection:
            return connection.execute(select(keys.c.name).limit(1)).first() is not None


def _find(connection: Connection, name: str) -> None:
    """Lock a key that is in force."""
    found = select(keys.c.name).where(keys.c.name == name, keys.c.revoked_at.is_(None)).with_for_update()
    if connection.execute(found).first() is None:
        raise KeyNotFound(f"there is no key named {name[:100]!r} in force; see: penstock keys list")


def _name_taken(name: str) -> RequestError:
    return RequestError(f"there is, or was, a key named {name!r}; give another name", param="name")


def _add_secret(connection: Connection, name: str, now: float) -> str:
    secret = _PREFIX + random_secrets.token_urlsafe(32)
    digest = hashlib.sha256(secret.encode()).hexdigest()
    connection.execute(insert(secrets).values(sha256=digest, name=name, created_at=now))
    _note_change(connection)
    return secret


def _drop_expired(connection: Connection, now: float) -> None:
    connection.execute(delete(secrets).where(secrets.c.expires_at <= now))


def _note_change(connection: Connection) -> None:
    connection.execute(update(state).values(keys_version=state.c.keys_version + 1))


def _stored(row: Row[tuple[object, ...]]) -> StoredKey:
    terms = msgspec.json.decode(row.terms, type=KeyTerms)
    return StoredKey(row.name, terms, row.created_at, row.revoked_at, row.num_secrets)
