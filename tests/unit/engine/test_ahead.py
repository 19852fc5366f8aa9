"""An engine process that begins before its options are read."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.engine.ahead import ENGINE_MODULE, EngineAhead, is_worth_it
from tests.server_process import is_alive, until


@pytest.mark.parametrize(
    ("arguments", "is_it"),
    [
        (["serve"], True),
        (["serve", "smollm2-135m", "--port", "0"], True),
        (["serve", "--help"], False),
        (["serve", "--device", "simulated"], False),
        (["serve", "--device=simulated"], False),
        (["models"], False),
        ([], False),
    ],
)
def test_only_what_will_want_torch_begins_ahead(monkeypatch: pytest.MonkeyPatch, arguments: list[str], is_it: bool):
    monkeypatch.delenv("PENSTOCK_DEVICE", raising=False)
    assert is_worth_it(arguments) is is_it
    monkeypatch.setenv("PENSTOCK_DEVICE", "simulated")
    assert not is_worth_it(arguments)


def test_a_process_that_nobody_takes_is_ended():
    begun, before = EngineAhead(), children()
    begun.begin()
    (pid,) = children() - before
    begun.close()
    assert not is_alive(pid)
    begun.close()


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def test_a_process_that_was_taken_is_the_callers():
    begun, before = EngineAhead(), children()
    begun.begin()
    (pid,) = children() - before
    process = begun.runner.run(begun.take())
    assert process is not None and process.pid == pid
    assert begun.runner.run(begun.take()) is None
    begun.cancel()
    time.sleep(0.1)
    assert is_alive(pid)
    process.kill()
    begun.runner.run(ended(process))
    begun.close()


async def ended(process: asyncio.subprocess.Process) -> None:
    await process.wait()


def test_a_process_that_died_is_not_taken():
    begun, before = EngineAhead(), children()
    begun.begin()
    (pid,) = children() - before
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_alive(pid), 10, "its end")
    time.sleep(0.1)  # until the thread that waits for it has said so
    assert begun.runner.run(begun.take()) is None
    begun.close()


def test_a_process_hears_nothing_of_what_an_operator_sends():
    begun, before = EngineAhead(), children()
    begun.begin()
    (pid,) = children() - before
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)  # which may come before its first line
    time.sleep(0.5)
    assert is_alive(pid)
    begun.close()


def test_a_process_that_is_told_nothing_ends_without_a_word():
    command = [sys.executable, "-m", ENGINE_MODULE]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_command_that_is_refused_leaves_no_process():
    command = [sys.executable, "-m", "penstock", "serve", "--port", "eighty"]
    # A session of its own, whose processes can be told from others.
    refused = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    assert refused.wait(60) == 2
    with pytest.raises(ProcessLookupError):
        os.killpg(refused.pid, 0)
