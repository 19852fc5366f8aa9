"""A sign of life that waits for no step: the engine process writes the time, whoever wants to know reads it.

A process that was stopped or has frozen writes no more, however long its steps may take. Says nothing of progress: a
hung device leaves the pulse as it is, and the count of steps tells. No torch.
"""

import os
import struct
import threading
import time
from pathlib import Path

PULSE_SECONDS = 0.25

_TIME = struct.Struct("<d")  # time.monotonic(): one clock for all processes of a machine


def pulse_path(socket_path: str) -> Path:
    """Where the engine of this socket has its pulse."""
    return Path(socket_path + ".pulse")


def age_seconds(path: Path) -> float:
    """Return how long ago the pulse last beat; infinity where there is none."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return float("inf")
    return time.monotonic() - _TIME.unpack(data)[0] if len(data) == _TIME.size else float("inf")


class Pulse:
    """Beats in a thread of its own until closed."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="penstock-pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        os.close(self._file)

    def _beat(self) -> None:
        while True:
            os.pwrite(self._file, _TIME.pack(time.monotonic()), 0)
            if self._closed.wait(PULSE_SECONDS):
                return
