"""Limits: reserved, settled, exact to the millisecond, and the same for everybody on a store."""

import json
import subprocess
import sys
import tempfile
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import LimitTooSmall
from penstock.request import Tier
from penstock.store.buckets import InUse
from penstock.store.database import Database
from penstock.store.ledger import UsageLedger
from penstock.store.quotas import LEASE_SECONDS, Ask, Glance, Lease, Need, QuotaStore, Refusal, Spent, Ticket, settle
from penstock.tenants import Caller, KeyTerms, Limits
from tests.unit.store.conftest import NOON, Clock


def caller(name="alice", **limits):
    return Caller(name, KeyTerms(limits=Limits(**limits)))


def need(input_tokens=10, output=10, *, stated=True, answers=1, least=0):
    return Need(
        input_tokens=input_tokens,
        most_output_tokens=output,
        output_is_stated=stated,
        least_output_tokens=least,
        num_answers=answers,
    )


def admit(quotas, caller, need, instead_of=None):
    """Ask for one request; LimitTooSmall is raised."""
    (outcome,) = quotas.admit([Ask(caller, need, instead_of)])
    if isinstance(outcome, LimitTooSmall):
        raise outcome
    return outcome


def look(quotas, caller, need, likely):
    """Ask what would become of one request; LimitTooSmall is raised."""
    (outcome,) = quotas.look([Glance(caller, need, likely)])
    if isinstance(outcome, LimitTooSmall):
        raise outcome
    return outcome


def end(database, lease, **spent):
    with database.writing() as connection:
        settle(database, connection, [(lease, Spent(**spent))])


@pytest.fixture
def quotas(sqlite_database):
    return QuotaStore(sqlite_database)


def admitted(outcome):
    assert isinstance(outcome, Lease), outcome
    return outcome


def refused(outcome):
    assert isinstance(outcome, Refusal), outcome
    return outcome


@pytest.mark.parametrize(
    ("limits", "name", "wait"),
    [
        ({"requests_per_minute": 2}, "requests_per_minute", 30.0),
        ({"input_tokens_per_minute": 25}, "input_tokens_per_minute", 12.0),
        ({"output_tokens_per_minute": 24}, "output_tokens_per_minute", 15.0),
        ({"tokens_per_day": 50}, "tokens_per_day", 43200.0),
    ],
)
def test_a_used_up_limit_is_named_with_the_wait_that_ends_it(quotas, clock, limits, name, wait):
    alice = caller(**limits)
    for _ in range(2):
        admitted(admit(quotas, alice, need()))
    refusal = refused(admit(quotas, alice, need()))
    assert (refusal.limit, refusal.most, refusal.retry_after_seconds) == (name, limits[name], wait)
    clock.now += wait - 0.01
    refused(admit(quotas, alice, need()))
    clock.now += 0.01
    admitted(admit(quotas, alice, need()))


def test_the_longest_of_several_waits_is_told(quotas):
    alice = caller(requests_per_minute=1, tokens_per_day=30)
    admitted(admit(quotas, alice, need()))
    assert refused(admit(quotas, alice, need())).limit == "tokens_per_day"


def test_a_refusal_uses_nothing(quotas, clock):
    alice = caller(requests_per_minute=1)
    admitted(admit(quotas, alice, need()))
    for _ in range(50):
        refused(admit(quotas, alice, need()))
    clock.now += 60
    admitted(admit(quotas, alice, need()))


def test_what_was_not_used_comes_back_at_the_end(quotas, sqlite_database):
    alice = caller(output_tokens_per_minute=100)
    lease = admitted(admit(quotas, alice, need(output=100)))
    refused(admit(quotas, alice, need(output=90)))
    end(sqlite_database, lease, input_tokens=10, output_tokens=10)
    admitted(admit(quotas, alice, need(output=90)))


def test_a_request_turned_away_through_no_fault_of_its_own_costs_nothing(quotas, sqlite_database):
    alice = caller(requests_per_minute=1, tokens_per_day=20)
    end(sqlite_database, admitted(admit(quotas, alice, need())), requests=0)
    admitted(admit(quotas, alice, need()))


def test_an_answer_longer_than_its_estimate_delays_the_next(quotas, sqlite_database):
    alice = caller(output_tokens_per_minute=600)
    lease = admitted(admit(quotas, alice, need(output=5000, stated=False)))
    assert lease.output_tokens == 256
    end(sqlite_database, lease, output_tokens=1000)
    assert refused(admit(quotas, alice, need(output=100))).retry_after_seconds == 50.0


def test_the_estimate_is_learnt_from_the_tenants_answers(quotas, sqlite_database):
    alice, bob = caller(output_tokens_per_minute=10**6), caller("bob", output_tokens_per_minute=10**6)
    for _ in range(100):
        lease = admitted(admit(quotas, alice, need(output=4000, stated=False, answers=2)))
        end(sqlite_database, lease, output_tokens=20)
    assert admitted(admit(quotas, alice, need(output=4000, stated=False))).output_tokens in (10, 11)
    assert admitted(admit(quotas, bob, need(output=4000, stated=False))).output_tokens == 256


def test_answers_that_were_limited_teach_nothing_of_those_that_are_not(quotas, sqlite_database):
    alice = caller(output_tokens_per_minute=10**6)
    for _ in range(60):
        end(sqlite_database, admitted(admit(quotas, alice, need(output=1))), output_tokens=1)
    assert admitted(admit(quotas, alice, need(output=4000, stated=False))).output_tokens == 256


def test_an_answer_that_was_cut_short_teaches_only_that_answers_are_longer(quotas, sqlite_database):
    alice = caller(output_tokens_per_minute=10**6)
    for length, estimate in ((1, 256), (356, 266)):
        lease = admitted(admit(quotas, alice, need(output=4000, stated=False)))
        end(sqlite_database, lease, output_tokens=length, is_whole=False)
        assert admitted(admit(quotas, alice, need(output=4000, stated=False))).output_tokens == estimate


def test_what_an_answer_has_for_certain_is_reserved_however_short_the_tenants_answers_are(quotas):
    alice = caller(output_tokens_per_minute=1000)
    assert admitted(admit(quotas, alice, need(output=4000, stated=False, least=600))).output_tokens == 600
    assert refused(admit(quotas, alice, need(output=4000, stated=False, least=600))).limit == "output_tokens_per_minute"
    with pytest.raises(LimitTooSmall, match="1001"):
        admit(quotas, alice, need(output=4000, stated=False, least=1001))


@pytest.mark.parametrize(
    ("used", "wait", "left"), [(130, 43200, 70), (170, 43200, 30), (190, 129600, 100), (8000, 129600, 100)]
)
def test_what_was_used_beyond_a_day_is_paid_by_the_next_and_by_no_other(
    quotas, sqlite_database, clock, used, wait, left
):
    alice = caller(tokens_per_day=100)
    lease = admitted(admit(quotas, alice, need(output=5000, stated=False)))
    end(sqlite_database, lease, input_tokens=10, output_tokens=used - 10)
    assert refused(admit(quotas, alice, need())).retry_after_seconds == wait
    clock.now += wait - 1
    refused(admit(quotas, alice, need()))
    clock.now += 1
    admitted(admit(quotas, alice, need(1, left - 1)))
    assert refused(admit(quotas, alice, need(1, 1))).retry_after_seconds == 86400


def test_an_answer_that_outgrows_its_estimate_over_midnight_is_paid_by_the_new_day(quotas, sqlite_database, clock):
    alice = caller(tokens_per_day=100)
    lease = admitted(admit(quotas, alice, need(output=5000, stated=False)))
    clock.now += 43200
    end(sqlite_database, lease, input_tokens=10, output_tokens=160)
    assert refused(admit(quotas, alice, need(output=30))).limit == "tokens_per_day"
    admitted(admit(quotas, alice, need(output=20)))


def test_a_look_tells_what_admission_would_and_changes_nothing(quotas, sqlite_database, clock):
    alice = caller(requests_per_minute=2, concurrent_requests=2)
    for _ in range(3):
        assert look(quotas, alice, need(), 10) is None
    leases = [admitted(admit(quotas, alice, need())) for _ in range(2)]
    assert refused(look(quotas, alice, need(), 10)) == refused(admit(quotas, alice, need()))
    clock.now += 29
    quotas.renew({lease.id: alice.tenant for lease in leases})
    clock.now += 1
    assert refused(look(quotas, alice, need(), 10)).limit == "concurrent_requests"
    for lease in leases:
        end(sqlite_database, lease)
    assert look(quotas, alice, need(), 10) is None


def test_requests_that_are_looked_at_together_are_told_as_if_each_were_alone(quotas):
    alice = caller(input_tokens_per_minute=60, output_tokens_per_minute=90)
    admitted(admit(quotas, alice, need(30, 10)))
    asked = [(need(1, 10), 20), (need(40, 10), 40), (need(61, 10), 61), (need(1, 91), 1), (need(1, 10), 200)]
    fits, later, too_long, too_much, likely_later = quotas.look([Glance(alice, *item) for item in asked])
    assert fits is None
    assert refused(later) == refused(look(quotas, alice, *asked[1]))
    assert refused(likely_later) == refused(look(quotas, alice, *asked[4]))
    assert [isinstance(outcome, LimitTooSmall) for outcome in (too_long, too_much)] == [True, True]


@settings(max_examples=15)
@given(st.integers(1, 60), st.integers(0, 300), st.integers(1, 90))
def test_whoever_comes_back_when_a_look_told_is_let_through(used, likely, output):
    limits = {"requests_per_minute": 1, "input_tokens_per_minute": 60, "output_tokens_per_minute": 90}
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock()
        database = Database.open(f"{folder}/s.db", clock=clock)
        quotas, alice = QuotaStore(database), caller(**limits)
        admitted(admit(quotas, alice, need(used, output)))
        refusal = refused(look(quotas, alice, need(1, output), likely))
        clock.now += refusal.retry_after_seconds
        assert look(quotas, alice, need(1, output), likely) is None
        admitted(admit(quotas, alice, need(max(1, min(likely, 60)), output)))
        database.close()


def test_after_a_clock_was_set_back_a_look_leaves_the_word_to_admission(quotas, clock):
    alice = caller(requests_per_minute=1)
    admitted(admit(quotas, alice, need()))
    clock.now -= 3600
    assert look(quotas, alice, need(), 10) is None
    refused(admit(quotas, alice, need()))
    assert refused(look(quotas, alice, need(), 10)).retry_after_seconds == 60.0


def test_a_request_that_ended_before_it_was_admitted_can_be_counted(quotas, clock):
    alice = caller(requests_per_minute=1)
    quotas.count_request(alice)
    assert refused(admit(quotas, alice, need())).retry_after_seconds == 60.0


def test_an_estimate_never_makes_a_request_wait_for_ever(quotas):
    alice = caller(output_tokens_per_minute=50, tokens_per_day=30)
    assert admitted(admit(quotas, alice, need(output=4000, stated=False))).output_tokens == 20


@pytest.mark.parametrize(
    ("limits", "param"),
    [
        ({"input_tokens_per_minute": 9}, None),
        ({"output_tokens_per_minute": 9}, "max_tokens"),
        ({"tokens_per_day": 19}, "max_tokens"),
    ],
)
def test_what_can_never_fit_is_not_told_to_wait(quotas, limits, param):
    with pytest.raises(LimitTooSmall) as caught:
        admit(quotas, caller(**limits), need())
    assert caught.value.param == param


def test_concurrent_requests_are_counted_until_they_end(quotas, sqlite_database):
    alice = caller(concurrent_requests=2)
    first = admitted(admit(quotas, alice, need()))
    admitted(admit(quotas, alice, need()))
    assert refused(admit(quotas, alice, need())).limit == "concurrent_requests"
    admitted(admit(quotas, caller("bob", concurrent_requests=1), need()))
    end(sqlite_database, first)
    admitted(admit(quotas, alice, need()))


def test_a_killed_processs_leases_run_out_and_its_estimate_stands(quotas, sqlite_database, clock):
    alice = caller(concurrent_requests=1, tokens_per_day=100)
    lost = admitted(admit(quotas, alice, need(output=50)))
    clock.now += LEASE_SECONDS + 1
    admitted(admit(quotas, alice, need(output=10)))
    end(sqlite_database, lost, output_tokens=0)
    clock.now += LEASE_SECONDS + 1
    assert refused(admit(quotas, alice, need(output=20))).limit == "tokens_per_day"


def test_who_goes_on_with_an_answer_takes_its_lease_over_once(quotas):
    alice = caller(concurrent_requests=1, requests_per_minute=1)
    begun = admitted(admit(quotas, alice, need()))
    refused(admit(quotas, alice, need()))
    other = caller("bob", requests_per_minute=1)
    admitted(admit(quotas, other, need()))
    refused(admit(quotas, other, need(), begun.ticket))  # another tenant's
    admitted(admit(quotas, alice, need(), begun.ticket))
    refused(admit(quotas, alice, need(), begun.ticket))


def test_what_goes_on_elsewhere_is_one_request_and_reserved_once(quotas, sqlite_database):
    alice = caller(requests_per_minute=5, tokens_per_day=100)
    begun = admitted(admit(quotas, alice, need(10, 30)))
    heir = admitted(admit(quotas, alice, need(10, 30), begun.ticket))
    assert heir.standing["requests_per_minute"].remaining == 4
    refused(admit(quotas, alice, need(10, 51)))
    end(sqlite_database, heir, input_tokens=10, output_tokens=20)
    admitted(admit(quotas, alice, need(10, 60)))


def test_more_than_was_reserved_is_not_taken_over(quotas):
    alice = caller(concurrent_requests=2, tokens_per_day=100)
    begun = admitted(admit(quotas, alice, need(10, 30)))
    refused(admit(quotas, alice, need(10, 51), begun.ticket))
    admitted(admit(quotas, alice, need(10, 50), begun.ticket))  # one more request, and all that is left of the day
    assert refused(admit(quotas, alice, need(1, 1))).limit == "tokens_per_day"


def test_a_lease_that_has_run_out_cannot_be_taken_over(quotas, clock):
    alice = caller(concurrent_requests=1)
    begun = admitted(admit(quotas, alice, need()))
    clock.now += LEASE_SECONDS
    admitted(admit(quotas, alice, need()))
    assert refused(admit(quotas, alice, need(), begun.ticket)).limit == "concurrent_requests"


def test_a_request_that_moves_over_midnight_stays_with_the_day_on_which_it_began(quotas, clock, sqlite_database):
    clock.now += 43200 - 1
    alice = caller(tokens_per_day=100)
    begun = admitted(admit(quotas, alice, need(10, 90)))
    clock.now += 2
    heir = admitted(admit(quotas, alice, need(10, 90), begun.ticket))
    end(sqlite_database, heir, input_tokens=10, output_tokens=90)
    admitted(admit(quotas, alice, need(10, 90)))


def test_a_holder_that_lives_neither_settles_nor_renews_what_was_taken_over(quotas, sqlite_database, clock):
    alice = caller(concurrent_requests=1, tokens_per_day=100)
    begun = admitted(admit(quotas, alice, need(10, 30)))
    heir = admitted(admit(quotas, alice, need(10, 30), begun.ticket))
    clock.now += LEASE_SECONDS - 1
    quotas.renew({begun.id: "alice", heir.id: "alice"})
    end(sqlite_database, begun, input_tokens=1, output_tokens=1)
    quotas.renew({begun.id: "alice"})
    end(sqlite_database, heir, input_tokens=10, output_tokens=20)
    refused(admit(quotas, alice, need(10, 61), begun.ticket))
    admitted(admit(quotas, alice, need(10, 60), begun.ticket))


@pytest.mark.parametrize("text", ["", "none", "a.2026-01-01.1.1", f"{'a' * 32}.2026-01-01.-1.5"])
def test_what_is_no_ticket_is_none(text):
    assert Ticket.parse(text) is None


def test_a_ticket_says_the_same_when_it_is_read_again(quotas):
    ticket = admitted(admit(quotas, caller(tokens_per_day=100), need(7, 8))).ticket
    assert Ticket.parse(str(ticket)) == ticket


def test_a_renewed_lease_does_not_run_out(quotas, clock):
    alice = caller(concurrent_requests=1)
    lease = admitted(admit(quotas, alice, need()))
    for _ in range(5):
        clock.now += LEASE_SECONDS - 1
        quotas.renew({lease.id: alice.tenant})
    assert refused(admit(quotas, alice, need())).limit == "concurrent_requests"


def test_nothing_is_settled_twice(quotas, sqlite_database):
    alice = caller(tokens_per_day=100)
    lease = admitted(admit(quotas, alice, need(output=50)))
    for _ in range(3):
        end(sqlite_database, lease, input_tokens=10, output_tokens=40)
    assert refused(admit(quotas, alice, need(output=41))).limit == "tokens_per_day"
    admitted(admit(quotas, alice, need(output=40)))


def test_a_day_ends_at_midnight_utc_whenever_a_request_began(quotas, sqlite_database, clock):
    alice = caller(tokens_per_day=30)
    lease = admitted(admit(quotas, alice, need()))
    clock.now += 43200
    admitted(admit(quotas, alice, need()))
    end(sqlite_database, lease, input_tokens=0, output_tokens=0)
    refused(admit(quotas, alice, need()))


def test_a_clock_set_back_gives_nothing_away_and_takes_nothing(quotas, clock):
    alice = caller(requests_per_minute=1)
    admitted(admit(quotas, alice, need()))
    clock.now -= 3600
    assert refused(admit(quotas, alice, need())).retry_after_seconds == 60.0
    clock.now += 60
    admitted(admit(quotas, alice, need()))


def test_a_clock_set_back_over_midnight_begins_no_day_again(quotas, clock):
    clock.now += 43200 + 1800
    alice = caller(tokens_per_day=20)
    admitted(admit(quotas, alice, need()))
    clock.now -= 3600
    assert refused(admit(quotas, alice, need())).retry_after_seconds == 86400 + 1800
    clock.now += 86400 + 1800
    admitted(admit(quotas, alice, need()))


def test_a_lease_that_a_clock_set_forward_ended_is_back_when_it_is_renewed(quotas, sqlite_database, clock):
    alice = caller(concurrent_requests=1, tokens_per_day=100)
    lease = admitted(admit(quotas, alice, need(output=50)))
    clock.now += 3600
    other = admitted(admit(quotas, alice, need()))
    end(sqlite_database, other, input_tokens=10, output_tokens=10)
    quotas.renew({lease.id: alice.tenant})
    assert refused(admit(quotas, alice, need())).limit == "concurrent_requests"
    end(sqlite_database, lease, input_tokens=10, output_tokens=10)
    admitted(admit(quotas, alice, need(output=50)))


def test_a_killed_processs_leases_run_out_though_the_clock_was_set_back(quotas, clock):
    alice = caller(concurrent_requests=1)
    admitted(admit(quotas, alice, need()))
    clock.now -= 3600
    assert refused(admit(quotas, alice, need())).limit == "concurrent_requests"
    clock.now += LEASE_SECONDS
    admitted(admit(quotas, alice, need()))


def test_a_lease_that_is_renewed_outlives_a_clock_set_back(quotas, clock):
    alice = caller(concurrent_requests=1)
    lease = admitted(admit(quotas, alice, need()))
    clock.now -= 3600
    for _ in range(4):
        assert refused(admit(quotas, alice, need())).limit == "concurrent_requests"
        quotas.renew({lease.id: alice.tenant})
        clock.now += LEASE_SECONDS - 1


def test_the_standing_is_told_with_the_admission(quotas):
    alice = caller(requests_per_minute=10, input_tokens_per_minute=100)
    standing = admitted(admit(quotas, alice, need(input_tokens=40))).standing
    assert {name: (item.limit, item.remaining, item.reset_seconds) for name, item in standing.items()} == {
        "requests_per_minute": (10, 9, 6.0),
        "input_tokens_per_minute": (100, 60, 24.0),
    }


moves = st.lists(st.tuples(st.floats(0, 40), st.integers(1, 30), st.integers(1, 30)), max_size=30)


@given(moves)
def test_in_no_span_of_time_is_more_admitted_than_the_bucket_holds_and_leaks(moves):
    limits = Limits(requests_per_minute=20, input_tokens_per_minute=60, output_tokens_per_minute=45)
    in_use, now, taken = InUse(at=NOON), NOON, []
    for seconds, input_tokens, output_tokens in moves:
        now += seconds
        in_use.move_to(now, limits)
        waits = in_use.waits(limits, input_tokens=input_tokens, output_tokens=output_tokens)
        if not any(waits.values()):
            in_use.add(requests=1, input_tokens=input_tokens, output_tokens=output_tokens, day=in_use.day)
            taken.append((now, 1, input_tokens, output_tokens))
    for start in range(len(taken)):
        for stop in range(start + 1, len(taken) + 1):
            span = taken[stop - 1][0] - taken[start][0]
            for index, limit in ((1, 20), (2, 60), (3, 45)):
                assert sum(item[index] for item in taken[start:stop]) <= limit + limit * span / 60 + 0.1


def moments(*actions):
    """Lists of what happens: seconds, which of these, and two numbers of it."""
    return st.lists(st.tuples(st.floats(0, 40), st.sampled_from(actions), st.integers(0, 30), st.integers(1, 30)))


@settings(max_examples=100, deadline=None)
@given(moments("admit", "admit", "end"))
def test_whenever_requests_are_settled_no_span_of_time_is_given_more_than_the_bucket_holds_and_leaks(
    tmp_path_factory, moments
):
    clock = Clock()
    database = Database.open(str(tmp_path_factory.mktemp("store") / "s.db"), clock=clock)
    quotas, alice = QuotaStore(database), caller(output_tokens_per_minute=45)
    held: list[Lease] = []
    taken: dict[str, tuple[float, int]] = {}  # when each was admitted, and what it counts for
    for seconds, action, which, amount in moments:
        for _ in range(int(seconds // 10)):
            clock.now += 10
            quotas.renew({lease.id: alice.tenant for lease in held})
        if action == "end" and held:
            lease = held.pop(which % len(held))
            spent = min(lease.output_tokens, which)
            taken[lease.id] = (taken[lease.id][0], spent)
            end(database, lease, input_tokens=10, output_tokens=spent)
        elif action == "admit" and isinstance(lease := admit(quotas, alice, need(output=amount)), Lease):
            held.append(lease)
            taken[lease.id] = (clock.now, amount)
            for start, _ in taken.values():
                given_out = sum(tokens for began, tokens in taken.values() if began >= start)
                assert given_out <= 45 + 45 * (clock.now - start) / 60 + 0.1
    database.close()


def test_what_has_leaked_is_not_given_back_again(quotas, sqlite_database, clock):
    alice = caller(output_tokens_per_minute=60)
    old = admitted(admit(quotas, alice, need(output=60)))
    for _ in range(6):
        clock.now += 10
        quotas.renew({old.id: alice.tenant})
    admitted(admit(quotas, alice, need(output=60)))
    end(sqlite_database, old, input_tokens=10, output_tokens=1)
    assert refused(admit(quotas, alice, need(output=60))).retry_after_seconds == 60.0


def test_a_long_answer_gives_back_what_is_left_of_its_reservation_whatever_came_and_went_since(
    quotas, sqlite_database, clock
):
    alice = caller(output_tokens_per_minute=60)
    long = admitted(admit(quotas, alice, need(output=30)))
    clock.now += 10
    for _ in range(5):
        short = admitted(admit(quotas, alice, need(output=40)))
        end(sqlite_database, short, input_tokens=10, output_tokens=0)
    moved = admitted(admit(quotas, alice, need(output=30), instead_of=long.ticket))
    end(sqlite_database, moved, input_tokens=10, output_tokens=1)
    admitted(admit(quotas, alice, need(output=60)))


@given(moves, st.integers(1, 30), st.integers(1, 30))
def test_a_request_fits_when_its_wait_is_over_and_not_sooner(moves, input_tokens, output_tokens):
    limits = Limits(requests_per_minute=20, input_tokens_per_minute=60, output_tokens_per_minute=45)
    in_use, now = InUse(at=NOON), NOON
    for seconds, more_input, more_output in moves:
        now += seconds / 10
        in_use.move_to(now, limits)
        in_use.add(requests=1, input_tokens=more_input, output_tokens=more_output, day=in_use.day)
    wait = max(in_use.waits(limits, input_tokens=input_tokens, output_tokens=output_tokens).values())
    if wait > 0.1:
        in_use.move_to(now + wait - 0.1, limits)
        assert any(in_use.waits(limits, input_tokens=input_tokens, output_tokens=output_tokens).values())
    in_use.move_to(now + wait, limits)
    assert not any(in_use.waits(limits, input_tokens=input_tokens, output_tokens=output_tokens).values())


steps = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.sampled_from("ab"), st.integers(1, 40), st.integers(1, 40)),
        st.tuples(st.just("end"), st.integers(0, 10), st.floats(0, 1), st.booleans()),
    ),
    max_size=40,
)


@settings(max_examples=25, deadline=None)
@given(steps)
def test_reservations_and_settlements_add_up_to_the_truth(tmp_path_factory, steps):
    database = Database.open(str(tmp_path_factory.mktemp("store") / "s.db"), clock=lambda: NOON)
    quotas = QuotaStore(database)
    terms = {"tokens_per_day": 300, "concurrent_requests": 3}
    held: list[Lease] = []
    used = {"a": 0, "b": 0}
    for step in steps:
        if step[0] == "admit":
            _, name, input_tokens, output_tokens = step
            outcome = admit(quotas, caller(name, **terms), need(input_tokens, output_tokens))
            own = [lease for lease in held if lease.tenant == name]
            fits = used[name] + input_tokens + output_tokens <= 300 and len(own) < 3
            assert isinstance(outcome, Lease) == fits
            if isinstance(outcome, Lease):
                held.append(outcome)
                used[name] += input_tokens + output_tokens
        elif held:
            lease = held.pop(step[1] % len(held))
            spent = int(lease.output_tokens * step[2])
            end(database, lease, input_tokens=lease.input_tokens, output_tokens=spent)
            used[lease.tenant] += spent - lease.output_tokens
    database.close()


lives = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(1, 20), st.integers(1, 40)),
        st.tuples(st.just("take over"), st.integers(0, 20), st.integers(1, 40)),
        st.tuples(st.just("end"), st.integers(0, 20), st.floats(0, 1)),
        st.tuples(st.just("renew"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("wait"), st.integers(1, 40), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=25, deadline=None)
@given(lives)
def test_whatever_is_taken_over_no_more_runs_or_is_served_than_the_limits_allow(tmp_path_factory, lives):
    """Any lease ever given out is tried again, whether it is held, moved, ended or run out."""
    clock = Clock()
    database = Database.open(str(tmp_path_factory.mktemp("store") / "s.db"), clock=clock)
    quotas, alice = QuotaStore(database), caller(tokens_per_day=200, concurrent_requests=2)
    ever: list[Lease] = []
    held: dict[str, float] = {}  # when each runs out
    charged: dict[str, int] = {}  # what each answer, by the lease that has it last, counts for
    for action, which, amount in lives:
        lease = ever[which % len(ever)] if ever else None
        running = [name for name, until in held.items() if until > clock.now]
        if action == "wait":
            clock.now += which
        elif action == "admit" or (action == "take over" and lease is not None):
            wish = need(which, amount) if action == "admit" else need(lease.input_tokens, amount)
            outcome = admit(quotas, alice, wish, lease.ticket if action == "take over" else None)
            moves = action == "take over" and lease.id in running and amount <= lease.output_tokens
            total = wish.input_tokens + amount
            fits = len(running) < 2 and sum(charged.values()) + total <= 200
            assert isinstance(outcome, Lease) == (moves or fits)
            if isinstance(outcome, Lease):
                ever.append(outcome)
                held[outcome.id] = clock.now + LEASE_SECONDS
                charged[outcome.id] = charged.pop(lease.id) if moves else total
                if moves:
                    del held[lease.id]
        elif action == "renew" and lease is not None and lease.id in running:
            quotas.renew({lease.id: "alice"})
            held[lease.id] = clock.now + LEASE_SECONDS
        elif action == "end" and lease is not None and (lease.id not in held or lease.id in running):
            spent = int(lease.output_tokens * amount)
            end(database, lease, input_tokens=lease.input_tokens, output_tokens=spent)
            if held.pop(lease.id, None) is not None:
                charged[lease.id] = lease.input_tokens + spent
        assert sum(charged.values()) <= 200
        assert sum(until > clock.now for until in held.values()) <= 2
    database.close()


HAMMER = """
import json, random, sys, threading, time
from penstock.errors import StoreUnavailable
from penstock.store.database import Database
from penstock.store.ledger import add_usage
from penstock.store.quotas import Ask, Lease, Need, QuotaStore, Spent, settle
from penstock.tenants import Caller, Limits, KeyTerms, Usage

location, name, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
database = Database.open(location)
caller = Caller("alice", KeyTerms(limits=Limits(tokens_per_day=1000, concurrent_requests=4)))
spent_in_all, lock = 0, threading.Lock()

def work(seed):
    global spent_in_all
    quotas, dice = QuotaStore(database), random.Random(f"{name}{seed}")
    for _ in range(rounds):
        need = Need(input_tokens=3, most_output_tokens=dice.randint(1, 20), output_is_stated=True)
        (lease,) = quotas.admit([Ask(caller, need)])
        while not isinstance(lease, Lease) and lease.limit == "concurrent_requests":  # or a crowd uses up no day
            time.sleep(0.001)
            (lease,) = quotas.admit([Ask(caller, need)])
        if isinstance(lease, Lease):
            output = dice.randint(0, need.most_output_tokens)
            spent = Spent(input_tokens=3, output_tokens=output)
            with database.writing() as connection:
                settle(database, connection, [(lease, spent)])
                usage = Usage(tenant="alice", model="m", day=lease.day, requests=1, prompt_tokens=3,
                              output_tokens=output)
                add_usage(connection, [usage])
            with lock:
                spent_in_all += 3 + output

threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps(spent_in_all))
"""


def test_several_processes_on_one_store_never_pass_a_limit_and_lose_nothing(any_location):
    database = Database.open(any_location)
    command = [sys.executable, "-c", HAMMER, any_location]
    processes = [
        subprocess.Popen([*command, f"p{number}", "30"], stdout=subprocess.PIPE, text=True) for number in range(3)
    ]
    spent = sum(json.loads(process.communicate(timeout=120)[0]) for process in processes)
    (entry,) = UsageLedger(database).read()
    assert entry.prompt_tokens + entry.output_tokens == spent
    assert 1000 - 23 < spent <= 1000, "used up, and not a token more"
    left = admit(QuotaStore(database), caller(tokens_per_day=1000), need(0, 1000 - spent or 1))
    assert isinstance(left, Lease) == (spent < 1000), "what is left is exactly what nobody used"
    database.close()


def test_threads_never_run_more_requests_at_once_than_allowed(any_database):
    alice = caller(concurrent_requests=3)
    running, most, ended, lock = 0, 0, 0, threading.Lock()

    def work():
        nonlocal running, most, ended
        quotas = QuotaStore(any_database)
        for _ in range(10):
            lease = admit(quotas, alice, need())
            if isinstance(lease, Lease):
                with lock:
                    running += 1
                    most = max(most, running)
                with lock:
                    running -= 1
                    ended += 1
                end(any_database, lease)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert 0 < most <= 3
    assert ended > 3
    for _ in range(3):
        admitted(admit(QuotaStore(any_database), alice, need()))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=6), max_size=6))
def test_requests_that_are_admitted_together_are_told_what_they_would_be_one_by_one(groups):
    limits = {
        "requests_per_minute": 9,
        "input_tokens_per_minute": 200,
        "output_tokens_per_minute": 50,
        "concurrent_requests": 7,
    }
    told = []
    for size in (None, 1):
        clock, outcomes = Clock(), []
        with tempfile.TemporaryDirectory() as folder:
            database = Database.open(f"{folder}/store.db", clock=clock)
            quotas, alice = QuotaStore(database), caller(**limits)
            for group in groups:
                asks = [Ask(alice, need(*amounts)) for amounts in group]
                step = size or len(asks)
                for start in range(0, len(asks), step):
                    outcomes += quotas.admit(asks[start : start + step])
                clock.now += 2.0
            database.close()
        told.append([(type(outcome).__name__, getattr(outcome, "standing", str(outcome))) for outcome in outcomes])
    assert told[0] == told[1]


# ---------------------------------------------------------------- batches


def batch_need(input_tokens=10, output=10):
    return Need(input_tokens=input_tokens, most_output_tokens=output, output_is_stated=True, tier=Tier.BATCH)


def test_a_batch_takes_nothing_from_the_minute(sqlite_database, quotas):
    limits = {"requests_per_minute": 1, "input_tokens_per_minute": 10, "concurrent_requests": 1, "tokens_per_day": 1000}
    alice = caller(**limits)
    leases = [admitted(admit(quotas, alice, batch_need())) for _ in range(5)]
    online = admitted(admit(quotas, alice, need()))
    assert refused(admit(quotas, alice, need())).limit == "requests_per_minute"
    for lease in leases:
        end(sqlite_database, lease, input_tokens=10, output_tokens=5)
    assert refused(admit(quotas, alice, need())).limit == "requests_per_minute", "and gives it nothing back"
    end(sqlite_database, online, input_tokens=10, output_tokens=10)


def test_a_batch_reserves_of_the_day_and_is_settled_with_the_truth(sqlite_database, quotas):
    alice = caller(tokens_per_day=50)
    leases = [admitted(admit(quotas, alice, batch_need())) for _ in range(2)]
    refusal = refused(admit(quotas, alice, batch_need()))
    assert (refusal.limit, refusal.retry_after_seconds) == ("tokens_per_day", 43200.0)
    end(sqlite_database, leases[0], input_tokens=5, output_tokens=5)
    end(sqlite_database, leases[1], requests=0)
    # Ten are used.
    assert isinstance(admit(quotas, alice, batch_need(20, 20)), Lease)
    assert isinstance(admit(quotas, alice, batch_need(1, 1)), Refusal)


def test_a_batch_larger_than_the_day_is_told(quotas):
    with pytest.raises(LimitTooSmall, match="tokens_per_day"):
        admit(quotas, caller(tokens_per_day=50), batch_need(50, 1))
