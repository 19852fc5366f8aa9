"""Lines about events: each one once, and never too many."""

import logging

from penstock.fleet.event_log import EventLog


def test_lines_beyond_the_limit_are_left_out_and_counted_in_the_next(clock, caplog):
    caplog.set_level(logging.INFO)
    log = EventLog(logging.getLogger("test"), clock, max_per_minute=2)
    for number in range(5):
        log.write("event", number=number)
    clock.now += 60
    log.write("event", number=5)
    log.write("event", number=6)
    told = [record.penstock_fields for record in caplog.records]
    assert told == [{"number": 0}, {"number": 1}, {"number": 5, "lines_left_out": 3}, {"number": 6}]
