"""The caller's end of a framed stream (`protocol.frames`), whichever replica feeds it.

Passes whole frames on, and keeps what another replica needs to go on behind the last of them. Knows nothing of how
replicas are chosen.
"""

import time
from collections.abc import Callable

import msgspec

from penstock.errors import DeadlineExceeded
from penstock.fleet.rollout.trial import Trial
from penstock.fleet.router.dispatch import Placement
from penstock.fleet.router.downstream import Downstream
from penstock.fleet.router.query import read_document
from penstock.fleet.router.replica_client import Answer
from penstock.fleet.router.upstream import UPSTREAM_ERRORS, blame, note_failure, note_refusal
from penstock.protocol.frames import FRAMES_HEADER, NO_LEASE, BrokenFrames, FrameReader


class _ChunkHead(msgspec.Struct):
    """What the chunks of one answer have in common."""

    id: str
    created: int


class FramedStream:
    def __init__(
        self, downstream: Downstream, sift: Callable[[bytes], bytes] | None, trial: Trial | None, blamed: set[str]
    ) -> None:
        """`sift` returns what the caller gets of the events, where that is not all; a trial that scores gets all.

        `blamed` are the replicas, by URL, which the request has failed on: none is blamed for it twice.
        """
        self.reader = FrameReader()
        self.why = ""  # the last replica that failed did so
        self.num_tokens_before = 0  # the newest replica had it
        self._head: _ChunkHead | None = None  # None: the caller has seen nothing yet
        self._blamed = blamed
        self._first_at: float | None = None
        self.lease: str | None = None  # that the newest replica holds for it
        self._downstream = downstream
        self._sift = sift
        self._scored = trial if trial is not None and trial.has_scores else None

    @property
    def num_tokens(self) -> int:
        """Tokens that the caller has."""
        return sum(map(len, self.reader.token_ids))

    @property
    def has_begun(self) -> bool:
        """Whether the caller has any of it."""
        return self._head is not None

    @property
    def is_late(self) -> bool:
        """Whether its deadline ended it, which another replica would have to keep as well."""
        return self.reader.failure == DeadlineExceeded.code

    def start_over(self) -> None:
        """Forget what the caller has not seen: another replica goes on behind the rest."""
        if self.has_begun:
            self.reader.start_over()
        else:
            self.reader = FrameReader()

    async def follow(self, placement: Placement, upstream: Answer) -> None:
        """Pass frames on until the last, or until the replica fails."""
        breaker, reader = placement.replica.breaker, self.reader
        self.num_tokens_before = self.num_tokens if self.has_begun else 0
        told = upstream.headers.get(FRAMES_HEADER, NO_LEASE)
        self.lease = told if told != NO_LEASE else None
        came = False
        try:
            while data := await upstream.read_any():
                events = reader.feed(data)
                if events:
                    if not came:
                        came = True
                        if self._head is None and not reader.finished:
                            self._head = _chunk_head(events)  # or nobody could go on behind it
                        self._first_at = self._first_at or time.monotonic()
                        breaker.on_answer()
                    if self._sift is None and reader.finished:
                        self._downstream.hold(events)  # it ends at once
                    elif passed := events if self._sift is None else self._sift(events):
                        await self._downstream.write(passed)
                    if self._scored is not None:
                        self._scored.keep(events)
                if reader.finished:
                    breaker.on_success()
                    return
                if reader.failure is not None:
                    self.why = f"it gave up with {reader.failure}"
                    if self.is_late:
                        breaker.on_success()
                    else:
                        note_refusal(placement.replica, 500, reader.failure, self._blamed)
                    return
            self.why = "it ended a stream early"
            blame(placement.replica, self.why, self._blamed)
        except UPSTREAM_ERRORS as error:
            # Servers cut readers that stop: whoever reads slowly must not have replicas ejected.
            self.why = "its caller read too slowly"
            if not self._downstream.was_slow:
                self.why = note_failure(placement.replica, error, self._blamed)
        except BrokenFrames as error:
            self.why = str(error)
            blame(placement.replica, self.why, self._blamed)
        finally:
            if reader.finished:
                upstream.leave()
            else:
                upstream.close()  # or the answer could run on there while another replica goes on with it

    def tell(self, trial: Trial) -> None:
        """Say what became of the stream on its first replica."""
        trial.was_hindered = self._downstream.was_slow
        if self.reader.finished:
            trial.end(self.reader.token_ids, self._first_at, self.reader.last_events)
        elif not trial.was_hindered:
            trial.fail()

    def continuation(self, body: bytes) -> bytes:
        """Return the body that asks for the rest of an answer; the whole of it where nothing was seen yet."""
        token_ids, head = self.reader.token_ids, self._head
        if head is None or not token_ids:
            return body
        document = read_document(body)
        begun: dict[str, object] = {"id": head.id, "created": head.created, "token_ids": token_ids}
        if self.reader.ended_choices:
            begun["ended"] = self.reader.ended_choices
        document["continue_from"] = begun
        return msgspec.json.encode(document)


def _chunk_head(events: bytes) -> _ChunkHead:
    """Return what the first of these events tells of all that follow. Raises BrokenFrames."""
    event = events.partition(b"data: ")[2].partition(b"\n")[0]
    try:
        return msgspec.json.decode(event, type=_ChunkHead)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BrokenFrames("its frames hold no chunks of an answer") from None
