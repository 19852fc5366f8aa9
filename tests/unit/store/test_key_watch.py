"""A ring follows its source, and keeps what it had when the source cannot be read."""

import hashlib

import pytest

from penstock.errors import NotAuthenticated
from penstock.store.database import Database
from penstock.store.key_ring import KeyRing
from penstock.store.key_watch import KeyFile, KeyWatcher
from penstock.store.keys import KeyStore
from penstock.tenants import OPEN_TENANT, KeyTerms


def entry(name: str) -> str:
    return f'[[keys]]\nname = "{name}"\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'


def knows(ring: KeyRing, secret: str) -> bool:
    try:
        return ring.identify(f"Bearer {secret}").tenant != OPEN_TENANT
    except NotAuthenticated:
        return False


async def test_a_changed_file_is_followed(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text(entry("alice"))
    ring = KeyRing(())
    watcher = KeyWatcher(ring, KeyFile(str(file)), needs_keys=True)
    await watcher.look()
    assert knows(ring, "alice")
    file.write_text(entry("bobby"))
    await watcher.look()
    assert not knows(ring, "alice")
    assert knows(ring, "bobby")


@pytest.mark.parametrize("text", ["", "keys = []\n", "# nobody\n"])
async def test_a_file_without_keys_revokes_them_all_and_opens_nothing(tmp_path, text):
    file = tmp_path / "keys.toml"
    file.write_text(entry("alice"))
    ring = KeyRing(())
    watcher = KeyWatcher(ring, KeyFile(str(file)), needs_keys=False)
    await watcher.look()
    assert knows(ring, "alice")
    file.write_text(text)
    await watcher.look()
    assert not knows(ring, "alice")
    assert not ring.is_open


@pytest.mark.parametrize("damage", ["this is no TOML", "keys = 5", None])
async def test_a_file_that_cannot_be_read_changes_nothing_and_is_read_when_it_can(tmp_path, damage, caplog):
    file = tmp_path / "keys.toml"
    file.write_text(entry("alice"))
    ring = KeyRing(())
    watcher = KeyWatcher(ring, KeyFile(str(file)), needs_keys=True)
    await watcher.look()
    file.unlink() if damage is None else file.write_text(damage)
    for _ in range(3):
        await watcher.look()
    assert knows(ring, "alice")
    assert len([line for line in caplog.records if "stay as they were" in line.message]) == 1, "said once"
    file.write_text(entry("alice") + entry("bobby"))
    await watcher.look()
    assert knows(ring, "bobby")


async def test_a_second_mistake_behind_one_that_was_mended_is_told_too(tmp_path, caplog):
    file = tmp_path / "keys.toml"
    file.write_text(entry("alice"))
    watcher = KeyWatcher(KeyRing(()), KeyFile(str(file)), needs_keys=True)
    await watcher.look()
    for damage in ("[[keys]\n", entry("alice") + "wieght = 2.0\n"):
        file.write_text(damage)
        for _ in range(2):
            await watcher.look()
    first, second = [line.message for line in caplog.records if "stay as they were" in line.message]
    assert "not valid TOML" in first
    assert "wieght" in second


async def test_a_store_without_keys_leaves_a_loopback_server_open_and_another_closed(tmp_path):
    database = Database.open(str(tmp_path / "s.db"))
    for needs_keys in (False, True):
        ring = KeyRing((), needs_keys=needs_keys)
        await KeyWatcher(ring, KeyStore(database), needs_keys=needs_keys).look()
        assert ring.is_open is not needs_keys
    database.close()


async def test_keys_are_read_again_only_when_they_changed(tmp_path, monkeypatch):
    database = Database.open(str(tmp_path / "s.db"))
    store = KeyStore(database)
    store.create("alice", KeyTerms())
    loads = []
    load = store.load
    monkeypatch.setattr(store, "load", lambda: loads.append(1) or load())
    watcher = KeyWatcher(KeyRing(()), store, needs_keys=False)
    for _ in range(5):
        await watcher.look()
    assert len(loads) == 1
    store.revoke("alice")
    await watcher.look()
    assert len(loads) == 2
    database.close()


async def test_a_first_key_that_is_made_while_keys_are_read_is_known_as_soon_as_the_server_is_closed(tmp_path):
    database = Database.open(str(tmp_path / "penstock.db"))
    store = KeyStore(database)
    made = []

    class Meanwhile:
        """The store, with a key made between any two reads of it."""

        def __getattr__(self, name):
            def read():
                found = getattr(store, name)()
                if name != "version" and not made:
                    made.append(store.create("alice", KeyTerms()))
                return found

            return read

    ring = KeyRing(())
    await KeyWatcher(ring, Meanwhile(), needs_keys=False).look()
    assert ring.is_open or knows(ring, made[0])
    database.close()
