"""Keys in the store: their secrets are told once and kept as digests."""

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import insert, text, update

from penstock.errors import KeyNotFound, RequestError
from penstock.request import Targets
from penstock.store.database import Database
from penstock.store.keys import KeyStore
from penstock.store.schema import keys, secrets
from penstock.tenants import KeyTerms, Limits

TERMS = KeyTerms(
    weight=2.5,
    priority=3,
    models=("a", "b"),
    admin=True,
    limits=Limits(requests_per_minute=60, longest_context=4096),
    targets=Targets(ttft_seconds=0.5),
)


def digest(secret):
    return hashlib.sha256(secret.encode()).hexdigest()


def test_a_created_key_opens_on_its_terms(any_database):
    store = KeyStore(any_database)
    secret = store.create("alice", TERMS)
    (key,) = store.load()
    assert (key.name, key.sha256, key.terms, key.expires_at) == ("alice", digest(secret), TERMS, None)


def test_a_secret_has_256_random_bits_and_is_not_in_the_store(sqlite_database, tmp_path):
    store = KeyStore(sqlite_database)
    first, second = store.create("a", KeyTerms()), store.create("b", KeyTerms())
    assert first != second
    assert len(first.removeprefix("psk-")) == 43
    with sqlite_database.reading() as connection:
        rows = str(connection.execute(text("select * from penstock_secrets")).all())
    assert first not in rows


def test_of_those_who_make_a_key_of_one_name_at_the_same_time_one_does_and_the_others_are_told(any_location):
    databases = [Database.open(any_location) for _ in range(4)]
    together = threading.Barrier(len(databases))

    def create(number):
        store = KeyStore(databases[number])
        outcomes = []
        for name in ("alice", "bob", "carol"):
            together.wait(10)
            try:
                store.create(name, KeyTerms())
                outcomes.append("made")
            except RequestError as error:
                outcomes.append(str(error)[:17])
        return outcomes

    try:
        with ThreadPoolExecutor(len(databases)) as threads:
            outcomes = list(threads.map(create, range(len(databases))))
        assert [sorted(same) for same in zip(*outcomes, strict=True)] == [["made", *["there is, or was,"] * 3]] * 3
        assert len(KeyStore(databases[0]).load()) == 3
    finally:
        for database in databases:
            database.close()


def test_every_change_of_keys_changes_the_version(any_database):
    store = KeyStore(any_database)
    versions = [store.version()]
    for change in (lambda: store.create("a", KeyTerms()), lambda: store.rotate("a"), lambda: store.revoke("a")):
        change()
        versions.append(store.version())
    assert len(set(versions)) == 4


def test_a_revoked_key_opens_nothing_and_its_name_is_not_given_again(any_database):
    store = KeyStore(any_database)
    store.create("alice", KeyTerms())
    store.revoke("alice")
    assert store.load() == ()
    assert store.had_any()
    (shown,) = store.list()
    assert shown.revoked_at is not None
    with pytest.raises(RequestError, match="another name"):
        store.create("alice", KeyTerms())


def test_a_rotated_key_opens_with_the_old_secret_until_the_overlap_ends(sqlite_database, clock):
    store = KeyStore(sqlite_database)
    old = store.create("alice", KeyTerms())
    new = store.rotate("alice", overlap_seconds=100)
    ends = {key.sha256: key.expires_at for key in store.load()}
    assert ends == {digest(old): clock.now + 100, digest(new): None}
    assert store.list()[0].num_secrets == 2
    clock.now += 101
    assert store.list()[0].num_secrets == 1


def test_rotating_again_does_not_lengthen_an_overlap(sqlite_database, clock):
    store = KeyStore(sqlite_database)
    first = store.create("alice", KeyTerms())
    store.rotate("alice", overlap_seconds=10)
    store.rotate("alice", overlap_seconds=1000)
    assert next(key.expires_at for key in store.load() if key.sha256 == digest(first)) == clock.now + 10


@pytest.mark.parametrize("change", ["revoke", "rotate"])
def test_an_unknown_or_revoked_key_cannot_be_changed(any_database, change):
    store = KeyStore(any_database)
    store.create("gone", KeyTerms())
    store.revoke("gone")
    for name in ("gone", "never"):
        with pytest.raises(KeyNotFound, match="penstock keys list"):
            getattr(store, change)(name)


@pytest.mark.parametrize(
    ("name", "terms", "word"),
    [
        ("a b", KeyTerms(), "64 letters"),
        ("", KeyTerms(), "64 letters"),
        ("a", KeyTerms(weight=0), "weight"),
        ("a", KeyTerms(weight=float("nan")), "weight"),
        ("a", KeyTerms(priority=5000), "priority"),
        ("a", KeyTerms(models=()), "models"),
        ("a", KeyTerms(limits=Limits(tokens_per_day=0)), "tokens_per_day"),
        ("a", KeyTerms(targets=Targets(ttft_seconds=-1)), "ttft_seconds"),
    ],
)
def test_wrong_terms_are_refused(sqlite_database, name, terms, word):
    store = KeyStore(sqlite_database)
    with pytest.raises(RequestError, match=word):
        store.create(name, terms)
    assert not store.had_any()


@pytest.mark.parametrize("name", [".", ".."])
def test_a_key_whose_path_leads_elsewhere_is_not_made(sqlite_database, name):
    with pytest.raises(RequestError, match="another name"):
        KeyStore(sqlite_database).create(name, KeyTerms())


def test_a_key_named_as_the_open_tenant_is_not_made_and_opens_nothing_where_it_is(any_database):
    store = KeyStore(any_database)
    with pytest.raises(RequestError, match="another name"):
        store.create("open", KeyTerms())
    store.create("alice", KeyTerms())
    with any_database.writing() as connection:
        connection.execute(insert(keys).values(name="open", terms="{}", created_at=0.0))
        connection.execute(update(secrets).values(name="open"))
    assert store.load() == ()
