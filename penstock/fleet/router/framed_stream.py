"""The caller's end of a framed stream (`protocol.frames`), whichever replica feeds it.

Passes whole frames on, and keeps what another replica needs to go on behind the last of them. Knows nothing of how
replicas are chosen.
"""

import time
from collections.abc import Callable

import msgspec

from penstock.fleet.rollout.trial import Trial
from penstock.fleet.router.dispatch import Placement
from penstock.fleet.router.downstream import Downstream
from penstock.fleet.router.replica_client import Answer
from penstock.fleet.router.upstream import UPSTREAM_ERRORS, note_failure, note_refusal
from penstock.protocol.frames import FRAMES_HEADER, NO_LEASE, BrokenFrames, FrameReader


class _ChunkHead(msgspec.Struct):
    """What the chunks of one answer have in common."""

    id: str
    created: int


class FramedStream:
    def __init__(self, downstream: Downstream, sift: Callable[[bytes], bytes] | None, trial: Trial | None) -> None:
        """`sift` returns what the caller gets of the events, where that is not all; a trial that scores gets all."""
        self.reader = FrameReader()
        self.first_events = b""
        self.why = ""  # the last replica that failed did so
        self._first_at: float | None = None
        self.lease: str | None = None  # that the newest replica holds for it
        self._downstream = downstream
        self._sift = sift
        self._scored = trial if trial is not None and trial.has_scores else None

    @property
    def num_tokens(self) -> int:
        """Tokens that the caller has."""
        return sum(map(len, self.reader.token_ids))

    async def follow(self, placement: Placement, upstream: Answer) -> bool:
        """Pass frames on until the last, or until the replica fails; return whether any came."""
        breaker, reader = placement.replica.breaker, self.reader
        told = upstream.headers.get(FRAMES_HEADER, NO_LEASE)
        self.lease = told if told != NO_LEASE else None
        came = False
        try:
            while data := await upstream.read_any():
                events = reader.feed(data)
                if events:
                    if not came:
                        came = True
                        self._first_at = self._first_at or time.monotonic()
                        breaker.on_answer()
                        self.first_events = self.first_events or events
                    if passed := events if self._sift is None else self._sift(events):
                        await self._downstream.write(passed)
                    if self._scored is not None:
                        self._scored.keep(events)
                if reader.finished:
                    breaker.on_success()
                    return came
                if reader.failure is not None:
                    self.why = f"it gave up with {reader.failure}"
                    note_refusal(placement.replica, 500, reader.failure)
                    return came
            self.why = "it ended a stream early"
            breaker.on_failure(self.why)
        except UPSTREAM_ERRORS as error:
            # Servers cut readers that stop: whoever reads slowly must not have replicas ejected.
            self.why = "its caller read too slowly"
            if not self._downstream.was_slow:
                self.why = note_failure(placement.replica, error)
        except BrokenFrames as error:
            self.why = str(error)
            breaker.on_failure(self.why)
        finally:
            if reader.finished:
                upstream.leave()
            else:
                upstream.close()  # or the answer could run on there while another replica goes on with it
        return came

    def tell(self, trial: Trial) -> None:
        """Say what became of the stream on its first replica."""
        trial.was_hindered = self._downstream.was_slow
        if self.reader.finished:
            trial.end(self.reader.token_ids, self._first_at)
        elif not trial.was_hindered:
            trial.fail()

    def continuation(self, body: bytes) -> bytes:
        """Return the body that asks for the rest of an answer; the whole of it where nothing was seen yet."""
        token_ids = self.reader.token_ids
        if not token_ids:
            return body
        document = msgspec.json.decode(body)
        event = self.first_events.partition(b"data: ")[2].partition(b"\n")[0]
        head = msgspec.json.decode(event, type=_ChunkHead)
        begun: dict[str, object] = {"id": head.id, "created": head.created, "token_ids": token_ids}
        if self.reader.ended_choices:
            begun["ended"] = self.reader.ended_choices
        document["continue_from"] = begun
        return msgspec.json.encode(document)
