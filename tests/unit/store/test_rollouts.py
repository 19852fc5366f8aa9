"""Rollouts in the store: one document a model, changed by one at a time, and everybody's evidence."""

import threading

import pytest

from penstock.store.rollouts import RolloutStore


@pytest.fixture
def book(any_database):
    return RolloutStore(any_database)


def keep(document, evidence, now):
    return None


def put(text):
    return lambda document, evidence, now: text


def test_a_document_is_there_for_everybody_once_it_was_put(book):
    assert book.read() == []
    assert book.change("tiny", 0, keep) is None
    assert book.change("tiny", 0, put("one")) == "one"
    assert book.change("tiny", 0, keep) == "one"
    assert book.read() == ["one"]


def test_every_gateways_newest_evidence_of_the_epoch_is_given_to_a_change(book):
    seen = []

    def look(document, evidence, now):
        seen.append(sorted(evidence))

    book.change("tiny", 3, look, gateway="x", evidence="x1")
    book.change("tiny", 3, look, gateway="y", evidence="y1")
    book.change("tiny", 3, look, gateway="x", evidence="x2")
    book.change("other", 3, look, gateway="x", evidence="else")
    assert seen == [["x1"], ["x1", "y1"], ["x2", "y1"], ["else"]]
    assert sorted(book.evidence("tiny", 3)) == ["x2", "y1"]


def test_evidence_of_an_epoch_before_is_forgotten(book):
    book.change("tiny", 3, keep, gateway="x", evidence="old")
    book.change("tiny", 4, keep, gateway="y", evidence="new")
    assert book.evidence("tiny", 4) == ["new"]
    assert book.evidence("tiny", 3) == []


def test_changes_follow_each_other(book):
    book.change("tiny", 0, put("0"))

    def count_up():
        for _ in range(10):
            book.change("tiny", 0, lambda document, evidence, now: str(int(document) + 1))

    threads = [threading.Thread(target=count_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert book.read() == ["40"]


def test_a_change_that_fails_changes_nothing(book):
    def fail(document, evidence, now):
        raise ValueError

    book.change("tiny", 0, put("one"))
    with pytest.raises(ValueError):
        book.change("tiny", 0, fail, gateway="x", evidence="lost")
    assert (book.read(), book.evidence("tiny", 0)) == (["one"], [])


def test_what_gateways_serve_is_known_for_a_while_or_until_they_stop(book):
    book.announce("x", "one")
    book.announce("y", "two")
    book.announce("x", "three")
    assert sorted(book.announced(60.0)) == ["three", "two"]
    book.announce("x", "")
    assert book.announced(60.0) == ["two"]
    assert book.announced(-1.0) == []
