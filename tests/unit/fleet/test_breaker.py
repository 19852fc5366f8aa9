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


def test_probes_that_fail_while_it_is_ejected_keep_nobody_out_for_longer(breaker, clock):
    breaker.on_failure("x", is_fatal=True)
    for _ in range(30):  # it starts again, and nobody listens yet
        clock.now += 1.0
        breaker.on_failure("refused", is_fatal=True)
    breaker.on_probe(True)
    assert breaker.standing is Standing.TRIAL


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
