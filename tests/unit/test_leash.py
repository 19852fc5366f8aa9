"""A command on a leash: it ends with its owner, and otherwise lives its own life."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.stop_signals import OPERATORS_SIGNALS, OWNERS_SIGNAL
from tests.server_process import until

SLEEP = "import time; print('here', flush=True); time.sleep(60)"
# A command that has a child of its own, as a server has.
PARENT = (
    "import subprocess, sys, time; "
    f"print(subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid, flush=True); time.sleep(60)"
)


@pytest.fixture
def leash():
    """Start a program on a leash; whatever is left of it ends with the test."""
    started = []

    def start(program):
        command = [sys.executable, "-m", "penstock.leash", sys.executable, "-c", program]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        process.stdin.close()
        process.stdout.close()


def lives(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_the_status_is_the_commands(leash):
    assert leash("raise SystemExit(7)").wait(30) == 7


def test_when_the_owner_goes_everything_it_started_goes(leash):
    process = leash(PARENT)
    grandchild = int(process.stdout.readline())
    assert lives(grandchild)
    process.stdin.close()
    process.wait(30)
    until(lambda: not lives(grandchild), 30, "the end of what the command started")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_when_the_leash_itself_is_killed_the_command_goes(leash):
    process = leash("import os; print(os.getpid(), flush=True); " + SLEEP)
    child = int(process.stdout.readline())
    process.kill()
    until(lambda: not lives(child), 30, "the command's end")


def test_the_owners_signal_reaches_the_command_and_an_operators_does_nothing(leash):
    number = int(OWNERS_SIGNAL)
    program = (
        f"import signal, sys, time; signal.signal({number}, lambda *_: sys.exit(5)); "
        "print('here', flush=True); time.sleep(60)"
    )
    process = leash(program)
    process.stdout.readline()
    for operators in OPERATORS_SIGNALS:
        os.killpg(process.pid, operators)
    process.send_signal(OWNERS_SIGNAL)
    assert process.wait(30) == 5
