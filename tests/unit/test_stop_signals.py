"""Which signals a process of ours ends at."""

import signal

import pytest

from penstock.stop_signals import OPERATORS_SIGNALS, OWNERS_SIGNAL, leave_to_owner, stop_signals


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number in OPERATORS_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_first_process_ends_at_an_operators_signals_and_an_owned_one_at_its_owners_alone():
    assert set(stop_signals()) == {*OPERATORS_SIGNALS, OWNERS_SIGNAL}
    leave_to_owner()
    assert stop_signals() == (OWNERS_SIGNAL,)
