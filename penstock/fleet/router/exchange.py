"""One request while it is on its way: what it is, what has become of it, and what its caller is told.

Knows nothing of how replicas are chosen, sent to or tried again.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from aiohttp import web
from multidict import CIMultiDict

from penstock.errors import DeadlineExceeded
from penstock.fleet.rollout.trial import Trial
from penstock.fleet.router.account import Account
from penstock.fleet.router.decisions import ROUTE_HEADER, Decision
from penstock.fleet.router.dispatch import Placement
from penstock.fleet.router.downstream import Downstream
from penstock.fleet.router.foreign_usage import asking_for_usage
from penstock.fleet.router.query import RouteQuery
from penstock.fleet.router.replica_client import Answer
from penstock.fleet.router.upstream import response_headers
from penstock.fleet.router.urgency import Urgency, with_time_left
from penstock.protocol.errors import ErrorReply, reply_for
from penstock.telemetry import RequestRecord

T = TypeVar("T")

# Whoever has waited less before it is sent need not say what is left of the times that its key states.
_UNSAID_SECONDS = 0.01


@dataclass(slots=True)
class Exchange:
    """One request while it is on its way."""

    request: web.Request
    body: bytes
    query: RouteQuery
    streams: bool
    record: RequestRecord
    decision: Decision
    urgency: Urgency
    has_keys: bool
    account: Account
    hides_usage: bool  # a stream's caller did not ask what it cost
    seed: int  # for a stream that may move to another replica: there it must draw the same
    is_counted_here: bool = False  # by the gateway, and not by the replica that has it
    avoid: set[str] = field(default_factory=set)
    blamed: set[str] = field(default_factory=set)  # URLs of replicas that broke its stream, once or more often
    ends_at: float | None = None  # its deadline, where the replica that has it knows nothing of deadlines
    full_since: float | None = None  # replicas have said that they are full, and none has answered
    num_failures: int = 0  # in a row
    num_breaks: int = 0  # of its stream, in all
    refusal: ErrorReply | None = None  # of the replica that failed it last
    trial: Trial | None = None  # of the replica that has it, where versions are compared

    def note_progress(self) -> None:
        """The caller got much further: whatever failed before that is forgotten."""
        self.num_failures = 0
        self.avoid.clear()

    @property
    def is_booked_here(self) -> bool:
        """Whether what it costs must be known here."""
        return self.account.is_kept and self.is_counted_here

    @property
    def has_expired(self) -> bool:
        """Whether its deadline has passed: no replica need try it any more."""
        return self.urgency.deadline is not None and time.monotonic() >= self.urgency.deadline

    def expire(self) -> DeadlineExceeded:
        """Return what to raise because it has: that is the request's own end, and nobody's failure."""
        self.record.error_code = DeadlineExceeded.code
        return DeadlineExceeded("its deadline passed before the answer was complete; give it more time")

    async def end_late(self, downstream: Downstream, events: bytes = b"") -> None:
        """End its stream because its deadline has passed, with the replica's word for it where there is one."""
        reply = reply_for(self.expire())
        await downstream.write(events or b"data: %b\n\n" % reply.body)
        await downstream.end()

    async def in_time(self, what: Awaitable[T]) -> T:
        """Wait for something of a replica. Raises TimeoutError at the deadline, where the replica knows of none."""
        if self.ends_at is None:
            return await what
        async with asyncio.timeout_at(self.ends_at):
            return await what

    def with_time_left(self, body: bytes, *, has_begun: bool) -> bytes:
        """Return a body for a server of ours, which knows of deadlines, as it must be sent now."""
        now = time.monotonic()
        leaves_keys = not self.is_counted_here and now - self.record.arrival < _UNSAID_SECONDS
        return with_time_left(body, self.urgency, now, has_begun=has_begun, leaves_keys=leaves_keys)

    def replica_body(self) -> bytes:
        """Return the body for the replica: where we must count, with the wish to know its cost."""
        path = self.request.rel_url.raw_path
        if self.is_booked_here and self.streams and self.hides_usage and path.endswith("/completions"):
            return asking_for_usage(self.body)
        return self.body

    def answer_headers(self, upstream: Answer) -> CIMultiDict[str]:
        """Return the head of what the caller gets of a replica's answer."""
        headers = response_headers(upstream.headers)
        if told := self.account.headers:
            headers.update(told)
        return self._signed(headers)

    def error_response(self) -> web.Response:
        """Return the refusal as the caller gets it."""
        reply = self.refusal
        assert reply is not None
        self.record.error_code = reply.code
        headers = CIMultiDict(reply.headers)
        headers.setdefault("content-type", "application/json")
        return web.Response(status=reply.status, body=reply.body, headers=self._signed(headers))

    def _signed(self, headers: CIMultiDict[str]) -> CIMultiDict[str]:
        headers["x-request-id"] = self.record.request_id
        headers[ROUTE_HEADER] = self.decision.header()
        return headers


@dataclass(frozen=True, slots=True)
class Passage:
    """A stream on its way from the replica that began it to the caller."""

    exchange: Exchange
    placement: Placement
    upstream: Answer
    downstream: Downstream
    begun: bytes  # that came of it
    sift: Callable[[bytes], bytes] | None = None  # returns what the caller gets of it; None: all
