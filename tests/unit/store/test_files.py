"""Files in the store: whole or not there, their tenant's alone, and removed without holding up others."""

import pytest
from sqlalchemy import func, select

from penstock.errors import StorageFull, UploadNotFound
from penstock.store import files as files_module
from penstock.store.files import CHUNK_BYTES, FileStore
from penstock.store.schema import file_chunks
from penstock.store.schema import files as stored_files
from tests.unit.store.conftest import after_each_transaction


def test_a_file_is_there_once_it_is_complete_and_only_for_its_tenant(any_database):
    files = FileStore(any_database)
    content = b"0123456789" * (CHUNK_BYTES // 5)
    file_id = files.begin("alice", "a.jsonl", "batch")
    size = files.fill(file_id, [content[:7], content[7:]])
    with pytest.raises(UploadNotFound):
        files.find("alice", file_id)
    files.finish("alice", file_id, "a.jsonl", size)
    assert files.find("alice", file_id).num_bytes == len(content)
    assert b"".join(files.read(file_id)) == content
    with pytest.raises(UploadNotFound):
        files.find("bob", file_id)
    files.delete("alice", file_id)
    with pytest.raises(UploadNotFound):
        list(files.read(file_id))


def test_a_tenants_files_are_bounded_together(sqlite_database, monkeypatch):
    monkeypatch.setattr(files_module, "MAX_TENANT_BYTES", 10)
    files = FileStore(sqlite_database)

    def store(tenant, content):
        file_id = files.begin(tenant, "a", "batch")
        return files.finish(tenant, file_id, "a", files.fill(file_id, [content]))

    store("alice", b"123456")
    with pytest.raises(StorageFull):
        store("alice", b"123456")
    store("bob", b"123456")
    assert len(files.list("alice", after=None, limit=10)) == 1


def test_a_large_file_is_hidden_at_once_and_removed_in_many_small_transactions(sqlite_database, monkeypatch):
    files, num_chunks = FileStore(sqlite_database), 9
    file_id = files.begin("alice", "", "batch")
    for number in range(num_chunks):
        files.append(file_id, number, b"x")
    files.finish("alice", file_id, "a", num_chunks)
    left = []

    def count_chunks(connection):
        assert not connection.execute(select(stored_files.c.id).where(stored_files.c.is_complete)).all()
        left.append(connection.execute(select(func.count()).select_from(file_chunks)).scalar_one())

    after_each_transaction(monkeypatch, count_chunks)
    files.delete("alice", file_id)
    assert left == [9, 5, 1, 0, 0]


def test_what_a_killed_process_left_unfinished_is_swept_away(sqlite_database, clock):
    files = FileStore(sqlite_database)
    left = files.begin("alice", "a", "batch")
    files.fill(left, [b"x"])
    files.sweep()
    assert list(files.read(left)) == [b"x"]
    clock.now += 25 * 3600
    files.sweep()
    with pytest.raises(UploadNotFound):
        list(files.read(left))
