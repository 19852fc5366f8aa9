"""Tokens in a stream of server-sent events, counted without parsing it.

A load generator reads thousands of events a second and must not be what is measured, so an event is only searched for
the text it brings. The last few reads are kept and parsed once, at the end: usage, errors and [DONE] are there.
"""

import itertools
import re
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

MAX_LINE_BYTES = 8 * 1024 * 1024
_TAIL_READS = 4

# Quotes inside a JSON text are escaped, so none can match within an answer. An event of a completion counts though its
# text is empty (half of a character, say) unless it only tells of the end, before its text or after it; in a chat an
# empty text is the role's.
_COMPLETION_TOKEN = re.compile(rb'"text"\s*:\s*"(?!"[^}]*"finish_reason"\s*:\s*")')
_COMPLETION_END = re.compile(rb'"finish_reason"\s*:\s*"[^{}]*"text"\s*:\s*""')
_CHAT_TOKEN = re.compile(rb'"(?:content|reasoning_content|reasoning)"\s*:\s*"(?!")')


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


@dataclass(slots=True)
class Ending:
    """What the end of a stream said."""

    is_whole: bool = False  # it had [DONE] or a reason to finish, and no error
    error: str | None = None
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None


class StreamScan:
    """One answer's bytes, however they are cut. `token_times` has an entry for each event that brought text."""

    def __init__(self, *, chat: bool) -> None:
        self.token_times = array("d")
        self._token = _CHAT_TOKEN if chat else _COMPLETION_TOKEN
        self._chat = chat
        self._rest = b""
        self._tail: deque[bytes] = deque(maxlen=_TAIL_READS)

    def push(self, chunk: bytes, at: float) -> bool:
        """Take what was read at a time. False if a line has grown beyond reason."""
        end = chunk.rfind(b"\n") + 1 or chunk.rfind(b"\r") + 1
        if not end:
            self._rest += chunk
            return len(self._rest) <= MAX_LINE_BYTES
        lines = self._rest + chunk[:end]
        self._rest = chunk[end:]
        if b"data" in lines or b"error" in lines:  # not just the empty line after an event, or a sign of life
            self._tail.append(lines)
        count = len(self._token.findall(lines))
        if count and not self._chat:
            count -= len(_COMPLETION_END.findall(lines))
        if count:
            self.token_times.extend([at] * count)
        return True

    def end(self) -> Ending:
        """Return what the last reads said, after the last `push`."""
        ending = Ending()
        for kind, lines in _events((b"".join(self._tail) + self._rest).splitlines()):
            if kind == b"error":
                ending.error = read_reason(b"\n".join(lines))
            elif not _take(b"\n".join(lines), ending):
                # Some servers leave out the empty line between two events.
                for line in lines:
                    _take(line, ending)
        ending.is_whole = ending.is_whole and ending.error is None
        if self.token_times and not ending.output_tokens:
            ending.output_tokens = None  # a server that does not count says 0
        return ending


def _events(lines: Iterable[bytes]) -> Iterator[tuple[bytes, list[bytes]]]:
    """Yield each event's name and its lines of data; llama.cpp names an error before its colon, not in a line."""
    name, data = b"", list[bytes]()
    for line in itertools.chain(lines, [b""]):
        kind, _, value = line.partition(b":")
        if kind == b"event":
            name = value.strip()
        elif kind == b"data":
            data.append(value.strip())
        elif kind == b"error":
            yield kind, [value]
        elif not line:
            if data:
                yield name, data
            name, data = b"", []


def _take(data: bytes, ending: Ending) -> bool:
    """Note what an event says of the end. False where it cannot be read."""
    if data == b"[DONE]":
        ending.is_whole = True
        return True
    try:
        event = msgspec.json.decode(data, type=_Event)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    if event.error is not None:
        ending.error = describe_error(event.error)
    if any(choice.finish_reason for choice in event.choices):
        ending.is_whole = True
    if event.usage is not None:
        ending.input_tokens = event.usage.prompt_tokens
        ending.output_tokens = event.usage.completion_tokens
        if event.usage.prompt_tokens_details is not None:
            ending.cached_tokens = event.usage.prompt_tokens_details.cached_tokens
    return True


def parse(body: bytes) -> Any:
    """Return what a JSON text holds, or None where it is none."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def read_reason(body: bytes) -> str:
    """Return why a server refused or gave up, from the JSON or the text that it sent."""
    document = parse(body)
    if isinstance(document, dict):
        return describe_error(document.get("error", document))
    return body[:500].decode("utf-8", "replace")


def describe_error(error: Any) -> str:
    """Return a server's word for what is wrong, in whichever of the usual shapes it comes."""
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
