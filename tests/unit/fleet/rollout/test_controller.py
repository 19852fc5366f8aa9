"""How a rollout is begun: from which version, and only where callers would still be answered."""

import msgspec
import pytest

from penstock.errors import RequestError
from penstock.fleet.rollout.book import RolloutMemory
from penstock.fleet.rollout.controller import abort_rollout, start_rollout
from penstock.fleet.rollout.course import Status
from penstock.fleet.rollout.plan import RolloutSection

AT_ONCE = RolloutSection(stable="v1", steps=(100.0,))


def book_of(*versions):
    book = RolloutMemory()
    book.announce("gateway", msgspec.json.encode({"tiny": list(versions)}).decode())
    return book


def test_a_rollout_from_a_version_that_nobody_serves_is_not_begun():
    book = book_of("v1", "v2")
    with pytest.raises(RequestError, match="no replica serves 'stable', the stable version; there are: v1, v2"):
        start_rollout(book, "tiny", "v2", None)
    assert book.read() == []
    assert start_rollout(book, "tiny", "v2", RolloutSection(stable="v1")).stable == "v1"


def test_a_fleet_without_its_stable_version_can_be_promoted_to_another_at_once():
    assert start_rollout(book_of("v2"), "tiny", "v2", AT_ONCE).status is Status.PROMOTED


def test_without_the_file_a_rollout_begins_where_the_last_one_ended_and_remembers_what_the_file_said():
    book = book_of("v1", "v2", "v3")
    start_rollout(book, "tiny", "v2", AT_ONCE)
    begun = start_rollout(book, "tiny", "v3", None)
    assert (begun.stable, begun.declared) == ("v2", "v1")
    assert abort_rollout(book, "tiny").stable_now == "v2"
