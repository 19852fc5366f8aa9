"""One request through the gateway: place, send, pass back, and try elsewhere what a replica failed.

Bytes of a stream are passed on as they come. Before the first of them another replica may be tried; after it only where
the stream is framed (`protocol.frames`): then another replica goes on behind the last whole frame, and the caller sees
one stream. Knows nothing of how replicas are found or chosen.
"""

import asyncio
import dataclasses
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

from penstock.errors import EngineFailed, EngineUnavailable, LimitReached, Overloaded, PenstockError
from penstock.fleet.event_log import EventLog
from penstock.fleet.replica import Replica
from penstock.fleet.rollout.shadow import ShadowCopy
from penstock.fleet.rollout.trial import Trial
from penstock.fleet.rollout.trials import Trials
from penstock.fleet.router.account import Account
from penstock.fleet.router.decisions import ROUTE_HEADER, Decision
from penstock.fleet.router.dispatch import Dispatcher, Placement, Wish
from penstock.fleet.router.downstream import Downstream, begin_stream
from penstock.fleet.router.foreign_usage import UsageReader, asking_for_usage, read_whole
from penstock.fleet.router.framed_stream import FramedStream
from penstock.fleet.router.metrics import GatewayMetrics
from penstock.fleet.router.query import RouteQuery
from penstock.fleet.router.replica_client import Answer, ReplicaClient
from penstock.fleet.router.upstream import (
    RETRIED_STATUSES,
    UPSTREAM_ERRORS,
    error_code,
    note_failure,
    note_refusal,
    read_error,
    request_headers,
    response_headers,
    retry_after_seconds,
)
from penstock.fleet.router.urgency import Urgency, with_time_left
from penstock.protocol.errors import ErrorReply, reply_for
from penstock.protocol.frames import FRAMES_HEADER
from penstock.protocol.prompt_note import PROMPT_HEADER, PromptNote, decode_note
from penstock.protocol.voucher import VOUCHER_HEADER, sign_voucher
from penstock.telemetry import RequestRecord
from penstock.tenants import Voucher

# Replicas that may fail a request in a row before it is given up: one that kills replicas must not kill them all.
MAX_ATTEMPTS = 3

log = logging.getLogger("penstock.gateway")


@dataclass(slots=True)
class _Exchange:
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
    num_failures: int = 0  # in a row
    refusal: ErrorReply | None = None  # of the replica that failed it last
    trial: Trial | None = None  # of the replica that has it, where versions are compared

    def note_progress(self) -> None:
        """The caller got something: whatever failed before that is forgotten."""
        self.num_failures = 0
        self.avoid.clear()


@dataclass(frozen=True, slots=True)
class _Break:
    """That a stream broke off: on which replica, why and when."""

    failed: Replica
    why: str
    at: float


@dataclass(frozen=True, slots=True)
class _Passage:
    """A stream on its way from the replica that began it to the caller."""

    exchange: _Exchange
    placement: Placement
    upstream: Answer
    downstream: Downstream
    sift: Callable[[bytes], bytes] | None = None  # returns what the caller gets of it; None: all


class Proxy:
    def __init__(
        self,
        client: ReplicaClient,
        dispatcher: Dispatcher,
        metrics: GatewayMetrics,
        trials: Trials,
        fleet_secret: str | None = None,
    ) -> None:
        """With the store's secret it vouches for what it sends to servers that share the store."""
        self._client = client
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._trials = trials
        self._fleet_secret = fleet_secret
        self._log = EventLog(log, time.monotonic)

    async def forward(
        self,
        request: web.Request,
        body: bytes,
        query: RouteQuery,
        record: RequestRecord,
        decision: Decision,
        *,
        streams: bool,
        urgency: Urgency,
        has_keys: bool,
        account: Account,
        hides_usage: bool,
    ) -> web.StreamResponse:
        """Answer a request with what a replica answers. Raises PenstockError where none does, and ClientGone."""
        seed = random.getrandbits(56)
        exchange = _Exchange(
            request, body, query, streams, record, decision, urgency, has_keys, account, hides_usage, seed
        )
        try:
            if account.is_kept and self._dispatcher.counts_nowhere(query.model):
                await account.open(record, self._dispatcher.max_context_tokens(query.model))
            return await self._answer(exchange)
        finally:
            account.close(record)

    async def _answer(self, exchange: _Exchange) -> web.StreamResponse:
        while True:
            try:
                placement = await self._place(exchange)
            except (Overloaded, EngineUnavailable) as error:
                if exchange.refusal is None or not isinstance(error, Overloaded):
                    exchange.account.refuse(exchange.record)
                    raise
                exchange.account.fail(exchange.record, exchange.refusal.status)
                exchange.decision.refuse(str(error), time.monotonic() - exchange.record.arrival)
                # The replica's own refusal says more, but perhaps not when to try again.
                exchange.refusal = _with_retry_after(exchange.refusal, reply_for(error))
                return _error_response(exchange)
            exchange.trial = self._trials.begin(exchange.query, placement.replica)
            try:
                response = await self._attempt(exchange, placement)
            finally:
                placement.release()
            self._end_trial(exchange)
            if response is not None:
                return response
            if exchange.num_failures >= MAX_ATTEMPTS:
                assert exchange.refusal is not None
                exchange.account.fail(exchange.record, exchange.refusal.status)
                return _error_response(exchange)
            self._metrics.retries.inc()

    async def _place(self, exchange: _Exchange) -> Placement:
        wish = Wish(exchange.query, exchange.urgency, exchange.avoid)
        placement = await self._dispatcher.acquire(wish)
        exchange.decision.attempts += 1
        exchange.decision.waited_seconds = time.monotonic() - exchange.record.arrival
        exchange.decision.take(placement)
        return placement

    async def _attempt(self, exchange: _Exchange, placement: Placement) -> web.StreamResponse | None:
        """Send the request to one replica; None where another should be tried."""
        replica = placement.replica
        exchange.is_counted_here = replica.is_counted_here
        if exchange.is_counted_here:
            await exchange.account.open(exchange.record, self._dispatcher.max_context_tokens(exchange.query.model))
        else:
            exchange.account.leave_to_replica()
        try:
            body = _body_of(exchange)
            if replica.adapter.counts_usage:  # a server of ours: it knows of deadlines
                body = with_time_left(body, exchange.urgency, time.monotonic(), has_begun=False)
            async with await self._open(exchange, placement, body) as upstream:
                if upstream.status in RETRIED_STATUSES or upstream.status == 429:
                    if await self._is_final(exchange, placement, upstream):
                        return _error_response(exchange)
                    return None
                if upstream.is_encoded and upstream.status < 400 and _is_booked_here(exchange):
                    replica.breaker.on_failure("it compresses answers, though it is asked not to")
                    unread = EngineFailed("a replica compressed its answer, so that nobody could read what it cost")
                    self._note_failure(exchange, placement, reply_for(unread))
                    return None
                self._note_first_byte(exchange, placement, upstream)
                if upstream.media_type == "text/event-stream":
                    return await self._pass_events(exchange, placement, upstream)
                whole = await upstream.read()
                replica.breaker.on_success()
                if exchange.trial is not None and upstream.status == 200:
                    exchange.trial.take_whole(whole)
                if upstream.status in (401, 403):
                    self._note_closed(exchange, replica, upstream.status)
                if exchange.is_counted_here:
                    await self._settle_whole(exchange, upstream.status, whole)
                headers = self._headers(exchange, upstream)
                return web.Response(status=upstream.status, body=whole, headers=headers)
        except UPSTREAM_ERRORS as error:
            note_failure(replica, error)
            self._note_failure(exchange, placement, reply_for(EngineFailed("a replica failed before it answered")))
            return None

    async def _settle_whole(self, exchange: _Exchange, status: int, body: bytes) -> None:
        if status >= 400:
            exchange.account.fail(exchange.record, status)
            return
        read_whole(body, exchange.record)
        await self._settle(exchange)

    async def _settle(self, exchange: _Exchange) -> None:
        """Write what an answer that is counted here cost before its last byte leaves."""
        if exchange.account.is_kept and exchange.record.usage_source:
            self._metrics.estimated_usage.inc()
        await exchange.account.settle(exchange.record)

    async def _open(self, exchange: _Exchange, placement: Placement, body: bytes, lease: str | None = None) -> Answer:
        """Send a request; `lease` is what the replica that had it before holds for it."""
        replica = placement.replica
        headers = request_headers(
            exchange.request.headers, replica, exchange.record.request_id, has_keys=exchange.has_keys
        )
        if exchange.streams and replica.adapter.can_frame:
            headers[FRAMES_HEADER] = str(exchange.seed)
        if replica.adapter.can_frame:
            headers[PROMPT_HEADER] = "1"
            if self._fleet_secret is not None:
                voucher = Voucher(exchange.query.asked_model, lease)
                headers[VOUCHER_HEADER] = sign_voucher(voucher, self._fleet_secret, headers.get("authorization"))
        return await self._client.post(replica.url, exchange.request.rel_url.raw_path, headers, body)

    async def _is_final(self, exchange: _Exchange, placement: Placement, upstream: Answer) -> bool:
        """Take a refusal in; return whether it is the caller's own limit, which holds everywhere."""
        body = await read_error(upstream.read)
        code = error_code(body)
        headers = response_headers(upstream.headers)
        reply = ErrorReply(upstream.status, code or "upstream_error", body, headers)
        if upstream.status == 429:
            exchange.refusal = reply
            if code == LimitReached.code:
                exchange.account.fail(exchange.record, 429)
                return True
            self._dispatcher.note_full(placement.replica, retry_after_seconds(upstream.headers))
            return False
        # One request that a server cannot digest must not have it ejected, however often it is tried there.
        if placement.replica.url not in exchange.avoid:
            note_refusal(placement.replica, upstream.status, code)
        self._note_failure(exchange, placement, reply)
        return False

    # ------------------------------------------------------------ streams

    async def _pass_events(self, exchange: _Exchange, placement: Placement, upstream: Answer) -> web.StreamResponse:
        response = web.StreamResponse(status=upstream.status, headers=self._headers(exchange, upstream))
        downstream = await begin_stream(exchange.request, response)
        carry = self._carry_frames if upstream.headers.get(FRAMES_HEADER) is not None else self._carry
        if _is_booked_here(exchange):
            reader = UsageReader(exchange.record, hides_usage=exchange.hides_usage)
            try:
                is_whole = await carry(_Passage(exchange, placement, upstream, downstream, reader.feed))
            finally:
                reader.note_cost()
            if is_whole:
                await self._settle(exchange)
                if rest := reader.last_bytes():
                    await downstream.write(rest)
        else:
            is_whole = await carry(_Passage(exchange, placement, upstream, downstream))
        if is_whole:
            await downstream.end()
        return response

    async def _carry(self, passage: _Passage) -> bool:
        """Pass a stream on, to its end. False: it broke, and ended with an error event."""
        exchange, placement, downstream = passage.exchange, passage.placement, passage.downstream
        sift = passage.sift
        is_first, passed_last = True, b""
        try:
            while data := await passage.upstream.read_any():
                placement.replica.breaker.on_answer()
                if is_first:
                    is_first = False
                    placement.note_first_byte(None, is_first_token=True)
                if passed := data if sift is None else sift(data):
                    passed_last = passed
                    await downstream.write(passed)
                if exchange.trial is not None:
                    exchange.trial.feed(data)
        except UPSTREAM_ERRORS as error:
            why = "its caller read too slowly"
            if not downstream.was_slow:
                why = note_failure(placement.replica, error)
                if exchange.trial is not None:
                    exchange.trial.fail()
            if passed_last and not passed_last.endswith((b"\n\n", b"\r\n\r\n")):
                await downstream.write(b"\n\n")  # or the error would be the rest of an event that broke off
            await self._end_with_error(exchange, placement.replica, why, downstream)
            return False
        placement.replica.breaker.on_success()
        if exchange.trial is not None:
            exchange.trial.was_hindered = downstream.was_slow
            exchange.trial.end()
        return True

    async def _carry_frames(self, passage: _Passage) -> bool:
        """Pass a framed stream on, as `_carry` does, and have another replica go on with it where this one fails."""
        exchange, placement = passage.exchange, passage.placement
        stream = FramedStream(passage.downstream, passage.sift, exchange.trial)
        reader = stream.reader
        if await stream.follow(placement, passage.upstream):
            exchange.note_progress()
        if exchange.trial is not None:
            stream.tell(exchange.trial)
        failure_events, cause = b"", _Break(placement.replica, stream.why, time.monotonic())
        while not reader.finished and exchange.num_failures < MAX_ATTEMPTS:
            placement.release()
            exchange.num_failures += 1
            exchange.avoid.add(placement.replica.url)
            failure_events = reader.failure_events or failure_events
            reader.start_over()
            other = await self._place_again(exchange)
            if other is None:
                break
            placement = other
            try:
                if await self._go_on(exchange, placement, stream, cause):
                    cause = _Break(placement.replica, stream.why, time.monotonic())
            finally:
                placement.release()
        if not reader.finished:
            exchange.account.lose()
            await self._end_with_error(exchange, placement.replica, stream.why, passage.downstream, failure_events)
        return reader.finished

    async def _place_again(self, exchange: _Exchange) -> Placement | None:
        urgency = dataclasses.replace(exchange.urgency, first_token_by=None)  # the caller has had it
        wish = Wish(exchange.query, urgency, exchange.avoid, must_frame=True, counted_here=exchange.is_counted_here)
        try:
            return await self._dispatcher.acquire(wish)
        except PenstockError:
            return None

    async def _go_on(self, exchange: _Exchange, placement: Placement, stream: FramedStream, cause: _Break) -> bool:
        """Have a replica go on with a stream behind what the caller has seen; return whether it did."""
        has_moved = False
        has_begun = bool(stream.first_events)
        body = with_time_left(
            stream.continuation(_body_of(exchange)),
            exchange.urgency,
            time.monotonic(),
            has_begun=has_begun,
        )
        try:
            async with await self._open(exchange, placement, body, stream.lease) as upstream:
                if upstream.status != 200 or upstream.headers.get(FRAMES_HEADER) is None:
                    code = error_code(await read_error(upstream.read))
                    stream.why = f"it answered {upstream.status} {code}".rstrip()
                    if code == LimitReached.code:
                        return False  # the tenant's, and not the replica's
                    if upstream.status == 429:
                        self._dispatcher.note_full(placement.replica, retry_after_seconds(upstream.headers))
                    else:
                        note_refusal(placement.replica, upstream.status, code)
                    return False
                has_moved = True
                self._note_moved(exchange, placement, stream, cause)
                self._note_prompt(exchange, placement, upstream)
                if await stream.follow(placement, upstream):
                    exchange.note_progress()
        except UPSTREAM_ERRORS as error:
            stream.why = note_failure(placement.replica, error)
        return has_moved

    def _note_moved(self, exchange: _Exchange, placement: Placement, stream: FramedStream, cause: _Break) -> None:
        """Say that a stream goes on: the replica has answered."""
        self._metrics.resumptions.labels("continued").inc()
        exchange.decision.resumptions += 1
        exchange.decision.take(placement)
        is_other = placement.replica is not cause.failed
        self._log.write(
            f"a stream goes on with {'another replica' if is_other else 'the replica that broke it off'}",
            level=logging.WARNING, replica=placement.replica.name, failed=cause.failed.name, reason=cause.why,
            tokens=stream.num_tokens, after_seconds=round(time.monotonic() - cause.at, 3),
            request_id=exchange.record.request_id,
        )  # fmt: skip

    async def _end_with_error(
        self, exchange: _Exchange, failed: Replica, why: str, downstream: Downstream, events: bytes = b""
    ) -> None:
        self._metrics.resumptions.labels("lost").inc()
        self._log.write(
            "a stream is lost: nobody could go on with it", level=logging.ERROR, failed=failed.name, reason=why,
            request_id=exchange.record.request_id,
        )  # fmt: skip
        reply = reply_for(EngineFailed("the replica failed while it answered, and none could go on; try again"))
        exchange.record.error_code = reply.code
        await downstream.write(events or b"data: %b\n\n" % reply.body)
        await downstream.end()

    # ------------------------------------------------------------ notes

    def _end_trial(self, exchange: _Exchange) -> None:
        trial, exchange.trial = exchange.trial, None
        if trial is not None:
            path, seconds = exchange.request.rel_url.raw_path, trial.seconds
            copy = ShadowCopy(path, exchange.body, exchange.streams, exchange.seed, seconds)
            # Not now: the caller's answer goes first.
            asyncio.get_running_loop().call_soon(self._trials.end, exchange.query, trial, copy)

    def _headers(self, exchange: _Exchange, upstream: Answer) -> dict[str, str]:
        headers = response_headers(upstream.headers) | exchange.account.headers
        headers["x-request-id"] = exchange.record.request_id
        headers[ROUTE_HEADER] = exchange.decision.header()
        return headers

    @staticmethod
    def _note_first_byte(exchange: _Exchange, placement: Placement, upstream: Answer) -> None:
        decision = exchange.decision
        exchange.record.ttft_seconds = decision.ttft_seconds = time.monotonic() - exchange.record.arrival
        note = Proxy._note_prompt(exchange, placement, upstream)
        # Ours begin to answer with the first token; others may send a stream's head at once.
        if note is not None or not exchange.streams:
            placement.note_first_byte(note, is_first_token=exchange.streams)

    @staticmethod
    def _note_prompt(exchange: _Exchange, placement: Placement, upstream: Answer) -> PromptNote | None:
        """Take what the replica that answers tells of the caller's prompt: the last to answer has the word."""
        placement.is_answered = True
        note = decode_note(upstream.headers.get(PROMPT_HEADER, ""))
        if note is not None:
            exchange.decision.prompt_tokens, exchange.decision.cached_tokens = note.num_tokens, note.num_cached_tokens
        return note

    @staticmethod
    def _note_closed(exchange: _Exchange, replica: Replica, status: int) -> None:
        """Say that a replica does not take a request which this gateway let in."""
        if not replica.adapter.counts_usage:
            message = f"a replica answers {status} to the gateway's own key: give key_file a key that it takes"
        elif exchange.has_keys:
            message = f"a replica answers {status} to a key that this gateway knows: give both the same store or keys"
        else:
            return  # the caller's own key, of which only the replica knows
        replica.log.write(message, level=logging.WARNING, replica=replica.name, tenant=exchange.record.tenant)

    def _note_failure(self, exchange: _Exchange, placement: Placement, reply: ErrorReply) -> None:
        if exchange.trial is not None:
            exchange.trial.fail()
        exchange.num_failures += 1
        exchange.refusal = reply
        exchange.avoid.add(placement.replica.url)


def _is_booked_here(exchange: _Exchange) -> bool:
    return exchange.account.is_kept and exchange.is_counted_here


def _body_of(exchange: _Exchange) -> bytes:
    """Return the body for the replica: where we must count, with the wish to know its cost."""
    path = exchange.request.rel_url.raw_path
    if _is_booked_here(exchange) and exchange.streams and exchange.hides_usage and path.endswith("/completions"):
        return asking_for_usage(exchange.body)
    return exchange.body


def _with_retry_after(refusal: ErrorReply, own: ErrorReply) -> ErrorReply:
    if any(name.lower().startswith("retry-after") for name in refusal.headers):
        return refusal
    return dataclasses.replace(refusal, headers={**refusal.headers, **own.headers})


def _error_response(exchange: _Exchange) -> web.Response:
    reply = exchange.refusal
    assert reply is not None
    exchange.record.error_code = reply.code
    headers = {"content-type": "application/json", **reply.headers, ROUTE_HEADER: exchange.decision.header()}
    headers["x-request-id"] = exchange.record.request_id
    return web.Response(status=reply.status, body=reply.body, headers=headers)
