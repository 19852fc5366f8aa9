"""Which version a request gets: its session's, always the same, unless somebody names one."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.fleet.rollout.course import Status, abort, start
from penstock.fleet.rollout.plan import RolloutSection
from penstock.fleet.rollout.split import VersionSplit
from penstock.fleet.router.query import RouteQuery, read_head


def query(session, *, tenant="a", version=None):
    return RouteQuery(
        read_head(b'{"model": "tiny", "prompt": "x"}'), model="tiny", tenant=tenant, session=session, version=version
    )


def at_percent(percent, **section):
    steps = (percent, 100.0) if percent < 100 else (100.0,)
    rollout = start("tiny", "b", RolloutSection(steps=steps), None, now=0.0)
    split = VersionSplit({"tiny": RolloutSection(**section)})
    split.replace([rollout])
    return split


def first(split, session, **who):
    return split.versions_for(query(session, **who))[0]


def test_without_a_word_about_versions_requests_get_those_that_name_none():
    assert VersionSplit({}).versions_for(query("s")) == ("stable",)


@given(st.text(max_size=20), st.floats(1, 99), st.floats(1, 99))
def test_a_conversation_stays_and_a_growing_share_only_adds_some(session, one, other):
    smaller, larger = sorted((one, other))
    before, after = first(at_percent(smaller), session), first(at_percent(larger), session)
    assert before == first(at_percent(smaller), session)
    assert (before, after) != ("b", "stable")


@pytest.mark.parametrize("percent", [5.0, 25.0, 50.0])
def test_a_share_is_as_large_as_it_says(percent):
    split = at_percent(percent)
    count = sum(first(split, f"session {number}") == "b" for number in range(4000))
    assert abs(count / 4000 - percent / 100) < 0.03


def test_what_the_candidate_cannot_take_the_stable_version_may():
    split = at_percent(99.9)
    assert split.versions_for(query("s")) == ("b", "stable")


def test_a_caller_may_name_a_version_and_such_requests_are_not_compared():
    split = at_percent(1.0)
    named = query("s", version="b")
    assert split.versions_for(named) == ("b", "stable")
    assert not split.is_drawn(named)
    assert split.is_drawn(query("s"))


def test_a_tenant_may_be_given_a_version():
    split = at_percent(1.0, tenants={"testers": "b"})
    assert first(split, "s", tenant="testers") == "b"
    assert not split.is_drawn(query("s", tenant="testers"))


@pytest.mark.parametrize("status", [Status.ROLLED_BACK, Status.ABORTED])
def test_a_version_that_was_rolled_back_only_goes_to_who_names_it(status):
    split = VersionSplit({"tiny": RolloutSection(tenants={"testers": "b"}, split={"b": 100.0})})
    rollout = abort(start("tiny", "b", RolloutSection(), None, now=0.0), 1.0)
    split.replace([msgspec.structs.replace(rollout, status=status)])
    assert first(split, "s") == "stable"
    assert first(split, "s", tenant="testers") == "stable"
    assert first(split, "s", version="b") == "b"


def test_a_promoted_version_is_the_only_one():
    split = at_percent(100.0)
    assert split.versions_for(query("s")) == ("b",)


def test_shares_of_the_file_hold_while_nothing_is_rolled_out():
    split = VersionSplit({"tiny": RolloutSection(stable="a", split={"b": 30.0, "c": 20.0})})
    versions = [first(split, f"session {number}") for number in range(4000)]
    assert [round(versions.count(name) / 4000, 1) for name in ("a", "b", "c")] == [0.5, 0.3, 0.2]


def test_prompts_of_token_ids_are_sessions_of_their_own():
    split = at_percent(50.0)
    queries = [
        RouteQuery(read_head(b'{"model": "tiny", "prompt": [5, %d]}' % number), model="tiny", tenant="a")
        for number in range(40)
    ]
    assert {split.versions_for(item)[0] for item in queries} == {"b", "stable"}
