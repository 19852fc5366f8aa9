"""Usage is written in few transactions, and a store that fails holds nobody up."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.errors import StoreUnavailable
from penstock.metering.books import Books
from penstock.metering.counts import StoreCounts
from penstock.store.database import Database
from penstock.store.ledger import UsageLedger
from penstock.tenants import Usage

ENTRY = Usage(tenant="alice", model="m", day="2026-01-01", requests=1)


class Store:
    """A database that counts transactions and can be made to fail."""

    def __init__(self, path) -> None:
        self.database = Database.open(str(path))
        self.transactions = 0
        self.counts = StoreCounts()
        self.fails = False

    def writing(self):
        self.transactions += 1
        if self.fails:
            raise StoreUnavailable("no")
        return self.database.writing()

    def requests(self) -> int:
        return sum(entry.requests for entry in UsageLedger(self.database).read())


@pytest.fixture
async def kept(tmp_path):
    store = Store(tmp_path / "s.db")
    with ThreadPoolExecutor(1) as thread:
        books = Books(store, thread, store.counts)
        yield store, books
        await books.close()
    store.database.close()


async def test_entries_that_come_together_are_written_together(kept):
    store, books = kept
    await asyncio.gather(*[books.note(ENTRY, None) for _ in range(200)])
    assert store.requests() == 200
    assert store.transactions <= 2


async def test_an_entry_is_written_when_its_wait_is_over(kept):
    store, books = kept
    for count in range(1, 4):
        await books.note(ENTRY, None)
        assert store.requests() == count


async def test_a_failing_store_holds_nobody_up_and_gets_everything_when_it_works_again(kept, monkeypatch):
    monkeypatch.setattr("penstock.metering.books._RETRY_SECONDS", 0.01)
    store, books = kept
    store.fails = True
    for _ in range(20):
        await asyncio.wait_for(books.note(ENTRY, None), 5)
    assert store.requests() == 0
    store.fails = False
    for _ in range(500):
        if store.requests() == 20:
            break
        await asyncio.sleep(0.01)
    assert store.requests() == 20


async def test_an_entry_that_is_impossible_is_counted_as_lost_and_costs_no_other(kept, caplog):
    store, books = kept
    absurd = Usage(tenant="bob", model="m", day="2026-01-01", prompt_tokens=10**30)
    await asyncio.gather(books.note(ENTRY, None), books.note(absurd, None), books.note(ENTRY, None))
    assert store.requests() == 2
    assert store.counts.num_store_failures == 1
    assert "usage was lost" in caplog.text


async def test_what_is_left_is_written_at_the_end(kept):
    store, books = kept
    for _ in range(5):
        books.note(ENTRY, None)
    await books.close()
    assert store.requests() == 5
