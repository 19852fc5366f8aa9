"""Which signals end a process of ours: an operator's the first of them, its owner's own signal all that it started.

A terminal, `kill -- -GROUP` and service managers signal every process at once. Only the first of ours acts upon that,
and ends the others in order: these ignore it, and wait for their owner's word. Knows nothing of what ending means.
"""

import contextlib
import signal
from collections.abc import Iterator

OPERATORS_SIGNALS = (signal.SIGTERM, signal.SIGINT)
OWNERS_SIGNAL = signal.SIGUSR1


def leave_to_owner() -> None:
    """Ignore what an operator sends to every process; whatever this one starts begins by ignoring it too."""
    for number in OPERATORS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def starting_owned() -> Iterator[None]:
    """Have whatever is started meanwhile hear nothing of what an operator sends. This process hears it afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OPERATORS_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end this process: its owner's alone, where that had it begin by ignoring the others."""
    is_owned = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    return (OWNERS_SIGNAL,) if is_owned else (*OPERATORS_SIGNALS, OWNERS_SIGNAL)
