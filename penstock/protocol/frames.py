"""Streams that a gateway can carry on elsewhere: server-sent events in frames that tell their tokens.

A gateway asks for them with the header `x-penstock-frames: SEED`, and a stream that has them answers with the same
header. To a gateway that vouches for the request (`protocol.voucher`) that tells the lease which it holds on its
tenant's limits; to anybody else, none. Each frame is a comment line, which any reader of server-sent events skips, and
the events behind it:

    : LENGTH 12,13\\n          LENGTH bytes of events follow, made of these tokens of the first choice
    : LENGTH 14;2:15,16.\\n    of several choices; with the full stop, the third has ended
    : LENGTH .\\n              the last events: finish, usage, [DONE]
    : LENGTH !code\\n          the server gives up with this error; its event follows

A frame is taken whole or not at all, so that what a client has seen and what its tokens say is always the same. Knows
nothing of HTTP.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

FRAMES_HEADER = "x-penstock-frames"
NO_LEASE = "none"
_MAX_HEAD_BYTES = 64 * 1024
_MAX_PAYLOAD_BYTES = 4 * 1024 * 1024
_IDS = rb"[0-9]{1,9}(?:,[0-9]{1,9})*"
_TOKEN_IDS = re.compile(_IDS)
_COMMON_HEAD = re.compile(rb": ([0-9]{1,8}) (" + _IDS + rb")\n")  # tokens of the first choice, which goes on


class ChoiceTokens(NamedTuple):
    """The tokens of one choice that a frame tells."""

    number: int  # of the choice, from 0
    token_ids: Sequence[int]
    has_ended: bool = False

    def note(self) -> str:
        text = ",".join(map(str, self.token_ids))
        if self.number or self.has_ended:
            text = f"{self.number}:{text}"
        return text + "." if self.has_ended else text


def frame(events: bytes, *choices: ChoiceTokens) -> bytes:
    """Return events with the tokens that they were made of."""
    note = ";".join([choice.note() for choice in choices])
    return b": %d %b\n%b" % (len(events), note.encode(), events)


def last_frame(events: bytes) -> bytes:
    return b": %d .\n%b" % (len(events), events)


def failure_frame(events: bytes, code: str) -> bytes:
    return b": %d !%b\n%b" % (len(events), code.encode(), events)


class BrokenFrames(Exception):
    """What came is no frame."""


class FrameReader:
    """Takes frames apart as their bytes arrive. Holds at most one unfinished frame."""

    def __init__(self) -> None:
        # By choice, ids as they came, each behind a comma: a long answer must not cost much.
        self._tokens: dict[int, bytearray] = {}
        self.ended_choices: list[int] = []
        self.finished = False
        self.last_events = b""  # whose tokens are not told
        self.failure: str | None = None  # the code with which the server gave up
        self.failure_events = b""
        self._rest = b""

    @property
    def token_ids(self) -> list[list[int]]:
        """All tokens told so far, for each choice up to the last of which anything was told."""
        last = max((*self._tokens, *self.ended_choices), default=-1)
        return [
            [int(token) for token in self._tokens.get(index, b"").split(b",") if token] for index in range(last + 1)
        ]

    def feed(self, data: bytes) -> bytes:
        """Take bytes in and return the events of the frames that are complete. Raises BrokenFrames."""
        if self._rest:
            data = self._rest + data
        # Nearly always one read is one frame.
        head = _COMMON_HEAD.match(data)
        if head is not None and head.end() + int(head[1]) == len(data):
            self._rest = b""
            self._take_ids(0, head[2])
            return data[head.end() :]
        return self._feed_many(data)

    def start_over(self) -> None:
        """Forget an unfinished frame and a failure: another server goes on behind the last whole frame."""
        self._rest = b""
        self.failure, self.failure_events = None, b""

    def _feed_many(self, data: bytes) -> bytes:
        pieces = []
        start = 0
        while True:
            end = data.find(b"\n", start)
            if end < 0:
                if len(data) - start > _MAX_HEAD_BYTES:
                    raise BrokenFrames("a frame's head has no end")
                break
            stop = self._take_head(data, start, end)
            if stop > len(data):
                break
            pieces.append(self._take(data, start, end, stop))
            start = stop
        self._rest = data[start:]
        return b"".join(pieces)

    def _take_head(self, data: bytes, start: int, end: int) -> int:
        """Return where the frame that begins at `start`, with a head up to `end`, stops."""
        space = data.find(b" ", start + 2, end)
        length = data[start + 2 : space]
        if data[start : start + 2] != b": " or space < 0 or not length.isdigit() or len(length) > 8:
            raise BrokenFrames("this is no frame's head")
        if int(length) > _MAX_PAYLOAD_BYTES:
            raise BrokenFrames("a frame is too large")
        return end + 1 + int(length)

    def _take(self, data: bytes, start: int, end: int, stop: int) -> bytes:
        note = data[data.find(b" ", start + 2, end) + 1 : end]
        events = data[end + 1 : stop]
        if note == b".":
            self.finished, self.last_events = True, events
        elif note.startswith(b"!"):
            self.failure, self.failure_events = note[1:].decode("ascii", "replace"), events
            return b""
        elif note:
            self._take_note(note)
        return events

    def _take_note(self, note: bytes) -> None:
        for part in note.split(b";"):
            index, separator, ids = part.rpartition(b":")
            index = index if separator else b"0"
            has_ended = ids.endswith(b".")
            ids = ids.removesuffix(b".")
            if not index.isdigit() or len(index) > 4 or (ids and not _TOKEN_IDS.fullmatch(ids)):
                raise BrokenFrames("a frame's tokens are not numbers")
            number = int(index)
            if has_ended:
                self.ended_choices.append(number)
            if ids:
                self._take_ids(number, ids)

    def _take_ids(self, number: int, ids: bytes) -> None:
        tokens = self._tokens.get(number)
        if tokens is None:
            tokens = self._tokens[number] = bytearray()
        tokens += b","
        tokens += ids
