"""When a replica is trusted: after how many failures not, for how long, and how it comes back."""

import pytest

from penstock.fleet.breaker import Breaker, Standing
from penstock.fleet.config import HealthSection


@pytest.fixture
def breaker(clock):
    settings = HealthSection(failures_to_eject=3, first_backoff_seconds=1.0, max_backoff_seconds=4.0)
    breaker = Breaker(settings, clock)
    breaker.on_probe(True)
    return breaker


def test_nobody_is_sent_a_request_before_it_was_asked(clock):
    assert not Breaker(HealthSection(), clock).admits(0)


def test_so_many_failures_in_a_row_eject(breaker):
    breaker.on_failure("x")
    breaker.on_failure("x")
    assert breaker.admits(5)
    breaker.on_failure("x")
    assert breaker.standing is Standing.EJECTED


def test_a_success_between_forgives(breaker):
    for _ in range(5):
        breaker.on_failure("x")
        breaker.on_failure("x")
        breaker.on_success()
    assert breaker.admits(0)


def test_a_refused_connection_ejects_at_once(breaker):
    breaker.on_failure("refused", is_fatal=True)
    assert breaker.standing is Standing.EJECTED
    assert "refused" in breaker.reason


def test_no_probe_brings_it_back_before_its_time(breaker, clock):
    breaker.on_failure("x", is_fatal=True)
    clock.now += 0.9
    breaker.on_probe(True)
    assert not breaker.admits(0)
    clock.now += 0.2
    breaker.on_probe(True)
    assert breaker.standing is Standing.TRIAL


def test_on_trial_it_gets_one_request_at_a_time(breaker, clock):
    breaker.on_failure("x", is_fatal=True)
    clock.now += 1.1
    breaker.on_probe(True)
    assert breaker.admits(0)
    assert not breaker.admits(1)
    breaker.on_success()
    assert breaker.admits(7)


def test_an_answer_that_began_ends_the_trial_and_only_its_end_forgives(breaker, clock):
    breaker.on_failure("x", is_fatal=True)
    clock.now += 1.1
    breaker.on_probe(True)
    breaker.on_answer()
    assert breaker.admits(7)
    breaker.on_failure("x", is_fatal=True)
    clock.now += 1.1
    breaker.on_probe(True)
    assert breaker.standing is Standing.EJECTED  # for longer: nothing has gone well yet


def test_while_it_stays_dead_it_is_tried_ever_more_seldom_up_to_a_limit(breaker, clock):
    breaker.on_failure("refused", is_fatal=True)
    began, waits = clock.now, []
    for _ in range(20):
        waits.append(breaker.seconds_until_try)
        clock.now += breaker.seconds_until_try - 0.1
        breaker.on_failure("refused", is_fatal=True)  # before its time: no try
        clock.now += 0.1
        breaker.on_failure("refused", is_fatal=True)
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (1.0, 4.0)
    assert breaker.num_ejections == 1
    assert clock.now - began > 16.0
    clock.now += breaker.seconds_until_try
    breaker.on_probe(True)
    assert breaker.standing is Standing.TRIAL
    assert breaker.seconds_until_try is None


def test_one_that_was_away_for_some_time_is_tried_within_a_quarter_of_that(clock):
    breaker = Breaker(HealthSection(), clock)
    breaker.on_failure("refused", is_fatal=True)
    began = clock.now
    while clock.now - began < 60.0:
        clock.now += breaker.seconds_until_try
        breaker.on_failure("refused", is_fatal=True)
        assert breaker.seconds_until_try <= max(0.5, 0.2500001 * (clock.now - began))


def test_one_that_is_needed_need_not_wait(breaker, clock):
    breaker.on_failure("refused", is_fatal=True)
    breaker.on_probe(True, is_needed=True)
    assert breaker.standing is Standing.TRIAL


def test_good_probes_end_the_trial_of_one_that_gets_no_requests(breaker, clock):
    breaker.on_failure("x", is_fatal=True)
    clock.now += 1.1
    breaker.on_probe(True)
    breaker.on_probe(True)
    breaker.on_probe(True)
    assert breaker.standing is Standing.TRIAL
    breaker.on_probe(True)
    assert breaker.standing is Standing.READY


def test_probes_end_no_trial_while_a_request_is_under_way(breaker, clock):
    breaker.on_failure("x", is_fatal=True)
    clock.now += 1.1
    for _ in range(10):
        breaker.on_probe(True, is_idle=False)
    assert breaker.standing is Standing.TRIAL


def test_one_that_was_well_for_long_begins_with_a_short_wait_again(breaker, clock):
    for _ in range(2):
        breaker.on_failure("x", is_fatal=True)
        clock.now += breaker.seconds_until_try
        for _ in range(4):
            breaker.on_probe(True)
    clock.now += 4.0
    breaker.on_failure("x", is_fatal=True)
    assert breaker.seconds_until_try == 1.0


def test_every_change_of_standing_is_told_once_with_how_long_the_last_one_held(clock):
    changes = []
    breaker = Breaker(HealthSection(first_backoff_seconds=1.0), clock, changes.append)
    breaker.on_probe(True)
    clock.now += 5.0
    for _ in range(3):
        breaker.on_failure("refused", is_fatal=True)
    clock.now += 1.0
    breaker.on_probe(True)
    breaker.on_success()
    for reason in ("draining", "draining", "no models"):
        breaker.on_probe(False, reason)
    told = [(change.now.value, change.seconds, change.wait_seconds) for change in changes]
    assert told == [
        ("ready", 0.0, None),
        ("ejected", 5.0, 1.0),
        ("trial", 1.0, None),
        ("ready", 0.0, None),
        ("not_ready", 0.0, None),
        ("not_ready", 0.0, None),
    ]
    assert "refused" in changes[1].reason


def test_each_failed_trial_doubles_the_wait_up_to_a_limit(breaker, clock):
    waits = []
    breaker.on_failure("x", is_fatal=True)
    for _ in range(4):
        began = clock.now
        while not breaker.admits(0):
            clock.now += 0.25
            breaker.on_probe(True)
        waits.append(clock.now - began)
        breaker.on_failure("x")
    assert waits == [1.0, 2.0, 4.0, 4.0]


def test_one_that_says_it_is_not_ready_is_not_punished(breaker):
    breaker.on_probe(False, "draining")
    assert not breaker.admits(0)
    breaker.on_probe(True)
    assert breaker.admits(3)
