"""When an engine that stands still is given up."""

from dataclasses import dataclass, field

import pytest

from penstock.engine.messages import EngineInfo, EngineStats
from penstock.server.engine_watch import EngineWatch, Patience

PATIENCE = Patience(still_seconds=10.0, step_seconds=30.0)


@dataclass
class Engine:
    """As a client sees it."""

    info: EngineInfo | None = None
    stats: EngineStats = field(default_factory=EngineStats)
    stats_age_seconds: float = 0.1
    pulse_age_seconds: float = 0.1
    connected: bool = True


@pytest.fixture
def engine():
    return Engine()


def looks(watch, count):
    """Look so often; return what was said the last time, and that nothing was before."""
    said = [watch.look() for _ in range(count)]
    assert said[:-1] == [None] * (count - 1)
    return said[-1]


def test_an_engine_that_works_or_rests_is_left_alone(engine):
    watch = EngineWatch(engine, PATIENCE)
    assert looks(watch, 1000) is None
    for num_steps in range(1000):
        engine.stats = EngineStats(num_running=1, num_steps=num_steps)
        assert watch.look() is None


def test_a_process_without_a_pulse_is_given_up_after_a_while(engine):
    watch = EngineWatch(engine, PATIENCE)
    engine.pulse_age_seconds = 2.0
    assert "stood still for 10 s" in looks(watch, 10)


def test_a_process_that_goes_on_in_time_is_left_alone(engine):
    watch = EngineWatch(engine, PATIENCE)
    for _ in range(3):
        engine.pulse_age_seconds = 9.0
        assert looks(watch, 9) is None
        engine.pulse_age_seconds = 0.1
        assert looks(watch, 1) is None


def test_what_stood_still_while_nobody_looked_is_left_alone(engine):
    """A machine that slept: its engine and whoever looks at it stood still together."""
    watch = EngineWatch(engine, PATIENCE)
    engine.pulse_age_seconds = engine.stats_age_seconds = 36_000.0
    assert looks(watch, 9) is None


def test_an_engine_whose_step_never_ends_is_given_up_later(engine):
    watch = EngineWatch(engine, PATIENCE)
    engine.stats = EngineStats(num_running=1, num_steps=7)
    assert watch.look() is None
    engine.stats_age_seconds = 20.0  # its loop waits for the step
    assert "no step" in looks(watch, 30)


def test_an_engine_that_speaks_and_has_work_and_never_ends_a_step_is_given_up_too(engine):
    watch = EngineWatch(engine, PATIENCE)
    engine.stats = EngineStats(num_running=1, num_steps=7)
    assert watch.look() is None
    assert "no step" in looks(watch, 30)


def test_steps_of_many_seconds_are_legal(engine):
    watch = EngineWatch(engine, PATIENCE)
    for num_steps in range(1, 5):
        engine.stats, engine.stats_age_seconds = EngineStats(num_running=1, num_steps=num_steps), 0.1
        assert watch.look() is None
        engine.stats_age_seconds = 20.0
        assert looks(watch, 29) is None


def test_a_start_takes_as_long_as_it_takes(engine):
    watch = EngineWatch(engine, PATIENCE)
    engine.connected, engine.pulse_age_seconds = False, float("inf")
    assert looks(watch, 1000) is None
    engine.connected = True
    assert "stood still for 10 s" in looks(watch, 10)
