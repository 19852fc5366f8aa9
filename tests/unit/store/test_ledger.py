"""The ledger adds up: whoever writes, however often, in whatever order."""

import threading

from penstock.store.ledger import UsageLedger, add_usage, day_of
from penstock.tenants import Usage


def entry(tenant="a", model="m", day="2026-01-01", **counts):
    return Usage(tenant=tenant, model=model, day=day, **counts)


def write(database, *entries):
    with database.writing() as connection:
        add_usage(connection, entries)


def test_entries_of_one_tenant_model_and_day_are_added(any_database):
    write(any_database, entry(requests=1, prompt_tokens=10), entry(requests=1, prompt_tokens=5, errors=1))
    write(any_database, entry(requests=1, output_tokens=7))
    assert UsageLedger(any_database).read() == [
        entry(requests=3, prompt_tokens=15, output_tokens=7, errors=1),
    ]


def test_a_model_of_any_name_keeps_no_other_entry_from_being_written(any_database):
    write(any_database, entry(requests=1), entry(model="x\0" * 300, refused=1), entry(model="x\0" * 400, refused=1))
    assert UsageLedger(any_database).read() == [entry(requests=1), entry(model="x" * 255, refused=2)]


def test_tenants_models_and_days_are_kept_apart(any_database):
    keys = [(tenant, model, day) for tenant in "ab" for model in "mn" for day in ("2026-01-01", "2026-01-02")]
    write(any_database, *[entry(*key, requests=1) for key in keys])
    assert len(UsageLedger(any_database).read()) == 8
    assert len(UsageLedger(any_database).read(tenant="a")) == 4
    assert {item.day for item in UsageLedger(any_database).read(since="2026-01-02")} == {"2026-01-02"}


def test_nothing_is_lost_between_writers(any_database):
    def work(own):
        for _ in range(20):
            write(any_database, *[entry(tenant, requests=1) for tenant in own])

    threads = [threading.Thread(target=work, args=(own,)) for own in ("abc", "cba", "bac", "acb")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [item.requests for item in UsageLedger(any_database).read()] == [80, 80, 80]


def test_days_are_utcs():
    assert day_of(0.0) == "1970-01-01"
    assert day_of(86399.9) == "1970-01-01"
    assert day_of(86400.0) == "1970-01-02"
