"""Whether a foreign server's stream tells that it failed: such servers say so in an event, behind a status of 200.

Reads events. Knows nothing of connections, nor of what follows from it.
"""

import re
from typing import Any

import msgspec

# As vLLM (in two ways), SGLang, llama.cpp and TGI write it. A quote in an answer's text is escaped, so that this is
# never found inside one.
_ERROR = re.compile(rb'^data: ?\{\s*(?:"error"\s*:\s*[{"]|"object"\s*:\s*"error")', re.MULTILINE)
_MOST_BEGUN_BYTES = 64  # of such an event, when the rest of what it is known by is yet to come
_MAX_HELD_BYTES = 64 * 1024
_FAILED = 500


class FailureWatch:
    """Follows a stream, however it is cut up. Changes nothing of it."""

    def __init__(self) -> None:
        self.has_answer = False  # something came before the failure
        self._begun = b""
        self._event = bytearray()  # that tells of the failure, and what came behind it

    def feed(self, data: bytes) -> None:
        if self._event:
            if len(self._event) < _MAX_HELD_BYTES:
                self._event += data
            return
        data = self._begun + data
        if found := _ERROR.search(data):
            before, self._event[:] = data[: found.start()], data[found.start() :]
        else:
            line = data.rfind(b"\n") + 1
            is_long = len(data) - line > _MOST_BEGUN_BYTES  # it has begun, and tells of no failure
            before, self._begun = data if is_long else data[:line], data[line:][-_MOST_BEGUN_BYTES:]
        self.has_answer = self.has_answer or b"data:" in before

    def status(self) -> int | None:
        """Return what the failure would have been as an answer: 4xx where it says so, else 500. None: there is none."""
        if not self._event:
            return None
        line = bytes(self._event).removeprefix(b"data:").partition(b"\n")[0]
        try:
            told = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _FAILED
        error = told.get("error")
        code = str((error if isinstance(error, dict) else told).get("code"))
        return int(code) if re.fullmatch(r"4\d\d", code, re.ASCII) else _FAILED
