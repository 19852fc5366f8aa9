"""An engine process that begins before its options are read: what takes it longest is to import torch.

The command's first line begins one, whoever serves takes it, and the command's last line ends one that nobody took. No
torch, and nothing that would take long to import.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence

from penstock.stop_signals import starting_owned

ENGINE_MODULE = "penstock.engine.process"
# An engine process that is given this word imports what drives a real device before it waits for its setup.
WITH_TORCH = "with-torch"
_LOOK_SECONDS = 0.005


class EngineAhead:
    """An event loop, and in it, once it has begun, a process that waits to be told what to do."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def runner(self) -> asyncio.Runner:
        """Runs what has to do with the process."""
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner

    def begin(self) -> None:
        """Start the process; without one, where the system has no room for it, nothing is lost but time."""
        with contextlib.suppress(OSError), starting_owned():
            self._process = self.runner.run(_start())

    async def take(self) -> asyncio.subprocess.Process | None:
        """Return the process, which is the caller's from now on; None where it has ended meanwhile."""
        process, self._process = self._process, None
        if process is None:
            return None
        # The loop has not run since the process began: it takes a moment until it knows.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _LOOK_SECONDS)
        if process.returncode is None:
            return process
        await process.communicate()
        return None

    def cancel(self) -> None:
        """End the process, if nobody took it."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            self.runner.run(process.communicate())

    def close(self) -> None:
        """Leave no process that nobody took, and no loop."""
        self.cancel()
        if self._runner is not None:
            self._runner.close()
            self._runner = None


async def _start() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        ENGINE_MODULE,
        WITH_TORCH,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )


# Of the command that runs in this process.
ENGINE_AHEAD = EngineAhead()


def is_worth_it(arguments: Sequence[str]) -> bool:
    """Whether the command with these arguments most likely wants an engine with torch."""
    if not arguments or arguments[0] != "serve" or {"-h", "--help"} & set(arguments):
        return False
    return not any(["simulated" in text for text in (*arguments, os.environ.get("PENSTOCK_DEVICE", ""))])
