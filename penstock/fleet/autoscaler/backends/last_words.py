"""What a process says on standard error: passed on to ours line by line, and the end of it kept.

Bounded. Knows nothing of the process or of what it says.
"""

import asyncio
import sys

_MAX_BYTES = 4096  # that are kept
_MAX_LINE_BYTES = 64 * 1024  # a line beyond that is passed on in pieces
_END_SECONDS = 0.5


class LastWords:
    """Make it in an event loop; it listens until the stream ends."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._kept = bytearray()
        self._listening = asyncio.create_task(self._listen(stream))

    async def end(self) -> None:
        """Wait for the end of what an ended process said, but not for long: its own children may hold the stream."""
        await asyncio.wait({self._listening}, timeout=_END_SECONDS)

    def lines(self, num_lines: int) -> list[str]:
        """Return the last lines so far that say something."""
        said = [line.strip() for line in self._kept.decode("utf-8", "replace").splitlines()]
        return [line for line in said if line][-num_lines:]

    async def _listen(self, stream: asyncio.StreamReader) -> None:
        pending = b""
        while data := await stream.read(_MAX_LINE_BYTES):
            self._kept += data
            del self._kept[:-_MAX_BYTES]
            # Whole lines, so that ours are not in the middle of them.
            whole, end, pending = (pending + data).rpartition(b"\n")
            if len(pending) > _MAX_LINE_BYTES:
                whole, end, pending = whole + end + pending, b"\n", b""
            _pass_on(whole + end)
        _pass_on(pending)


def _pass_on(data: bytes) -> None:
    if data:
        sys.stderr.write(data.decode("utf-8", "replace"))
        sys.stderr.flush()
