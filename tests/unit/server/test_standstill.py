"""Whether a server stood still until a moment ago."""

import pytest

from penstock.server.standstill import Standstill
from tests.unit.server.test_engine_watch import Engine


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_a_server_that_is_looked_at_in_time_stands_still_at_no_time(clock):
    standstill = Standstill(Engine(), clock)
    for _ in range(10):
        standstill.look()
        clock.now += 0.5
    assert not standstill.is_recent()


def test_one_that_was_stopped_did_so_until_a_moment_ago(clock):
    standstill = Standstill(Engine(), clock)
    standstill.look()
    clock.now += 8.0
    assert standstill.is_recent()  # also where what ended meanwhile is seen before the next look
    clock.now += 0.9
    assert standstill.is_recent()
    clock.now += 0.2
    assert not standstill.is_recent()


def test_one_whose_engine_has_no_pulse_stands_still(clock):
    engine = Engine(pulse_age_seconds=2.5)
    standstill = Standstill(engine, clock)
    assert standstill.is_recent()
    engine.pulse_age_seconds = 0.1
    assert standstill.is_recent()
    clock.now += 1.1
    assert not standstill.is_recent()


def test_an_engine_that_is_started_again_has_no_pulse_yet(clock):
    assert not Standstill(Engine(pulse_age_seconds=float("inf"), connected=False), clock).is_recent()
