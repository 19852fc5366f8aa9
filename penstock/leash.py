"""Runs a command for as long as whoever started it lives: `python -m penstock.leash COMMAND …`.

Standard input is the leash, a pipe that the owner holds and never writes to. When it ends the owner is gone, and what
it had, such as a GPU, may be given to another at once: the command and everything it started is killed. The owner's
signal (`stop_signals`) is passed on to the command; an operator's, sent to all processes, is the owner's to act upon.
Start it in a session of its own. Knows nothing of the command.

Ray kills the children of an actor's process when that ends, so this process may be killed first: then the kernel kills
the command, where it can be asked to (Linux).
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading

from penstock.stop_signals import OWNERS_SIGNAL, leave_to_owner

_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def main(command: list[str]) -> int:
    """Run a command to its end; return its exit status."""
    leave_to_owner()
    # There is no other thread yet, so that code may run between fork and exec.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)  # noqa: PLW1509
    signal.signal(OWNERS_SIGNAL, lambda received, _: child.send_signal(received))
    threading.Thread(target=_wait_for_owner, daemon=True).start()
    return child.wait()


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_for_owner() -> None:
    # Not through sys.stdin, whose lock this thread would hold when the interpreter ends.
    while os.read(0, 1024):
        continue
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
