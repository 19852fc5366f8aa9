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
from dataclasses import dataclass

from aiohttp import web

from penstock.errors import (
    AnswerTooLarge,
    DeadlineExceeded,
    EngineFailed,
    EngineUnavailable,
    LimitReached,
    Overloaded,
    PenstockError,
)
from penstock.fleet.event_log import EventLog
from penstock.fleet.replica import Replica
from penstock.fleet.rollout.shadow import ShadowCopy
from penstock.fleet.rollout.trials import Trials
from penstock.fleet.router.account import Account
from penstock.fleet.router.decisions import Decision
from penstock.fleet.router.dispatch import Dispatcher, Placement, Wish
from penstock.fleet.router.downstream import Downstream, begin_stream
from penstock.fleet.router.exchange import Exchange, Passage
from penstock.fleet.router.foreign_failure import FailureWatch
from penstock.fleet.router.foreign_usage import UsageReader, read_whole
from penstock.fleet.router.framed_stream import FramedStream
from penstock.fleet.router.metrics import GatewayMetrics
from penstock.fleet.router.query import RouteQuery
from penstock.fleet.router.replica_client import Answer, ReplicaClient
from penstock.fleet.router.upstream import (
    RETRIED_STATUSES,
    UPSTREAM_ERRORS,
    error_code,
    first_events,
    hides_callers_key,
    note_failure,
    note_refusal,
    read_error,
    refusal_reply,
    request_headers,
    response_headers,
    retry_after_seconds,
    with_retry_after,
)
from penstock.fleet.router.urgency import Urgency
from penstock.protocol.errors import ErrorReply, reply_for
from penstock.protocol.frames import FRAMES_HEADER
from penstock.protocol.prompt_note import PROMPT_HEADER, PromptNote, decode_note
from penstock.protocol.voucher import VOUCHER_HEADER, sign_voucher
from penstock.telemetry import RequestRecord
from penstock.tenants import Voucher

# Replicas that may fail a request in a row before it is given up: one that kills replicas must not kill them all.
MAX_ATTEMPTS = 3
# Of a stream that has begun: what a replica must add to it for a new row to begin, and how often it may break in all.
_PROGRESS_TOKENS = 8
_MAX_BREAKS = 16
# Of an answer that is no stream. What is held can be had from another replica where this one breaks off; what is larger
# is passed on as it comes, unless its cost must be read.
_HELD_BYTES = 1024 * 1024
_READ_BYTES = 32 * 1024 * 1024

log = logging.getLogger("penstock.gateway")


@dataclass(frozen=True, slots=True)
class _Break:
    """That a stream broke off: on which replica, why and when."""

    failed: Replica
    why: str
    at: float


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
        exchange = Exchange(
            request, body, query, streams, record, decision, urgency, has_keys, account, hides_usage, seed
        )
        try:
            if account.is_kept and self._dispatcher.counts_nowhere(query.model):
                await account.open(record, self._dispatcher.max_context_tokens(query.model))
            return await self._answer(exchange)
        finally:
            account.close(record)

    async def _answer(self, exchange: Exchange) -> web.StreamResponse:
        while True:
            try:
                placement = await self._place(exchange)
            except (Overloaded, EngineUnavailable) as error:
                if exchange.refusal is None or not isinstance(error, Overloaded):
                    exchange.account.refuse(exchange.record, error)
                    raise
                exchange.account.fail(exchange.record, exchange.refusal.status)
                exchange.decision.refuse(str(error), time.monotonic() - exchange.record.arrival)
                # The replica's own refusal says more, but perhaps not when to try again.
                exchange.refusal = with_retry_after(exchange.refusal, reply_for(error))
                return exchange.error_response()
            exchange.trial = self._trials.begin(exchange.query, placement.replica)
            try:
                response = await self._attempt(exchange, placement)
            finally:
                placement.release()
            self._end_trial(exchange)
            if response is not None:
                return response
            if exchange.num_failures >= MAX_ATTEMPTS or self._was_full_too_long(exchange):
                assert exchange.refusal is not None
                exchange.account.fail(exchange.record, exchange.refusal.status)
                return exchange.error_response()
            self._metrics.retries.inc()

    def _was_full_too_long(self, exchange: Exchange) -> bool:
        """Whether replicas have gone on to say that they are full, though they promised a place, for too long."""
        since = exchange.full_since
        return since is not None and time.monotonic() - since > self._dispatcher.max_wait_seconds

    async def _place(self, exchange: Exchange) -> Placement:
        wish = Wish(exchange.query, exchange.urgency, exchange.avoid)
        placement = await self._dispatcher.acquire(wish)
        exchange.decision.attempts += 1
        exchange.decision.waited_seconds = time.monotonic() - exchange.record.arrival
        exchange.decision.take(placement)
        return placement

    async def _attempt(self, exchange: Exchange, placement: Placement) -> web.StreamResponse | None:
        """Send the request to one replica; None where another should be tried."""
        replica = placement.replica
        if exchange.has_expired:
            raise exchange.expire()
        exchange.ends_at = None if replica.adapter.counts_usage else exchange.urgency.deadline
        exchange.is_counted_here = replica.is_counted_here
        if exchange.is_counted_here:
            await exchange.account.open(exchange.record, self._dispatcher.max_context_tokens(exchange.query.model))
        else:
            exchange.account.leave_to_replica()
        try:
            body = exchange.replica_body()
            if replica.adapter.counts_usage:  # a server of ours: it knows of deadlines
                body = exchange.with_time_left(body, has_begun=False)
            async with await exchange.in_time(self._open(exchange, placement, body)) as upstream:
                if upstream.status in RETRIED_STATUSES or upstream.status == 429:
                    if await self._is_final(exchange, placement, upstream):
                        return exchange.error_response()
                    return None
                if upstream.status == 401 and hides_callers_key(replica, has_keys=exchange.has_keys):
                    self._note_closed(exchange, replica, upstream.status)
                    replica.breaker.on_failure("it does not take the gateway's key")
                    closed = EngineUnavailable(
                        "a replica does not take the gateway's key; the gateway's log says which"
                    )
                    self._note_failure(exchange, placement, reply_for(closed))
                    return None
                if exchange.is_booked_here and upstream.status < 400 and upstream.is_encoded:
                    replica.breaker.on_failure("it compresses answers, though it is asked not to")
                    unread = EngineFailed("a replica compressed its answer, so that nobody could read what it cost")
                    self._note_failure(exchange, placement, reply_for(unread))
                    return None
                if upstream.media_type == "text/event-stream" and upstream.status < 400:
                    begun = await exchange.in_time(first_events(upstream))
                    self._note_first_byte(exchange, placement, upstream, is_first_token=True)
                    return await self._pass_events(exchange, placement, upstream, begun)
                self._note_first_byte(exchange, placement, upstream)
                return await self._pass_plain(exchange, placement, upstream)
        except UPSTREAM_ERRORS as error:
            if exchange.has_expired and isinstance(error, TimeoutError):
                raise exchange.expire() from None
            note_failure(replica, error)
            self._note_failure(exchange, placement, reply_for(EngineFailed("a replica failed before it answered")))
            return None

    async def _pass_plain(self, exchange: Exchange, placement: Placement, upstream: Answer) -> web.StreamResponse:
        """Answer with what is no stream. Raises what the replica fails with before the caller has any of it."""
        must_read = exchange.is_booked_here and upstream.status < 400
        most_bytes = _READ_BYTES if must_read else _HELD_BYTES
        is_larger = (upstream.num_declared_bytes or 0) > most_bytes
        begun = b"" if is_larger else await exchange.in_time(upstream.read(most_bytes))
        if upstream.status in (401, 403):
            self._note_closed(exchange, placement.replica, upstream.status)
        elif upstream.status == 404:
            placement.replica.denies_models = True
        if not upstream.is_read:
            return await (self._refuse_large if must_read else self._pass_large)(exchange, placement, upstream, begun)
        placement.replica.breaker.on_success()
        if exchange.trial is not None and upstream.status == 200:
            exchange.trial.take_whole(begun)
        if exchange.is_counted_here:
            await self._settle_whole(exchange, upstream.status, begun)
        return web.Response(status=upstream.status, body=begun, headers=exchange.answer_headers(upstream))

    async def _refuse_large(
        self, exchange: Exchange, placement: Placement, upstream: Answer, begun: bytes
    ) -> web.StreamResponse:
        """Answer in the place of a replica whose answer nobody can book; any other would answer the same."""
        self._log.write(
            "an answer is larger than what is read to know its cost", level=logging.ERROR,
            replica=placement.replica.name, request_id=exchange.record.request_id, max_bytes=_READ_BYTES,
        )  # fmt: skip
        if exchange.trial is not None:
            exchange.trial.fail()
        exchange.refusal = reply_for(AnswerTooLarge(_READ_BYTES))
        exchange.account.fail(exchange.record, exchange.refusal.status)
        return exchange.error_response()

    async def _pass_large(
        self, exchange: Exchange, placement: Placement, upstream: Answer, begun: bytes
    ) -> web.StreamResponse:
        """Pass an answer on as it comes, behind what was held of it."""
        if exchange.is_counted_here and upstream.status >= 400:
            exchange.account.fail(exchange.record, upstream.status)
        response = web.StreamResponse(status=upstream.status, headers=exchange.answer_headers(upstream))
        response.content_length = upstream.num_declared_bytes
        downstream = await begin_stream(exchange.request, response)
        try:
            data = begun or await upstream.read_plain()
            while data:
                await downstream.write(data)
                data = await upstream.read_plain()
        except UPSTREAM_ERRORS as error:
            if not downstream.was_slow:
                note_failure(placement.replica, error)
                if exchange.trial is not None:
                    exchange.trial.fail()
            downstream.cut()  # the caller must not take a part for the whole
            return response
        placement.replica.breaker.on_success()
        if exchange.trial is not None and upstream.status == 200:
            exchange.trial.was_hindered = downstream.was_slow
            exchange.trial.take_whole(begun)
        await downstream.end()
        return response

    async def _settle_whole(self, exchange: Exchange, status: int, body: bytes) -> None:
        if not (200 <= status < 300 and body):  # a redirect, or nothing at all, is the caller's to see and no answer
            exchange.account.fail(exchange.record, status)
            return
        read_whole(body, exchange.record)
        await self._settle(exchange)

    async def _settle(self, exchange: Exchange) -> None:
        """Write what an answer that is counted here cost before its last byte leaves."""
        if exchange.account.is_kept and exchange.record.usage_source:
            self._metrics.estimated_usage.inc()
        await exchange.account.settle(exchange.record)

    async def _open(self, exchange: Exchange, placement: Placement, body: bytes, lease: str | None = None) -> Answer:
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

    async def _is_final(self, exchange: Exchange, placement: Placement, upstream: Answer) -> bool:
        """Take a refusal in; return whether it is the caller's own limit or deadline, which holds everywhere."""
        body = await read_error(upstream.read)
        code = error_code(body)
        reply = refusal_reply(upstream.status, code or "upstream_error", body, response_headers(upstream.headers))
        if upstream.status == 429:
            exchange.refusal = reply
            if code == LimitReached.code:
                exchange.account.fail(exchange.record, 429)
                return True
            exchange.full_since = exchange.full_since or time.monotonic()
            self._dispatcher.note_full(placement.replica, retry_after_seconds(upstream.headers))
            return False
        if code == DeadlineExceeded.code:
            exchange.refusal = reply
            exchange.account.fail(exchange.record, upstream.status)
            placement.replica.breaker.on_success()
            return True
        # One request that a server cannot digest must not have it ejected, however often it is tried there.
        if placement.replica.url not in exchange.avoid:
            note_refusal(placement.replica, upstream.status, code)
        self._note_failure(exchange, placement, reply)
        return False

    # ------------------------------------------------------------ streams

    async def _pass_events(
        self, exchange: Exchange, placement: Placement, upstream: Answer, begun: bytes
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=upstream.status, headers=exchange.answer_headers(upstream))
        downstream = await begin_stream(exchange.request, response)
        carry = self._carry_frames if upstream.headers.get(FRAMES_HEADER) is not None else self._carry
        if exchange.is_booked_here:
            reader = UsageReader(exchange.record, hides_usage=exchange.hides_usage)
            try:
                is_whole = await carry(Passage(exchange, placement, upstream, downstream, begun, reader.feed))
            finally:
                reader.note_cost()
            if is_whole:
                await self._settle(exchange)
                if rest := reader.last_bytes():
                    await downstream.write(rest)
        else:
            is_whole = await carry(Passage(exchange, placement, upstream, downstream, begun))
        if is_whole:
            await downstream.end()
        return response

    async def _carry(self, passage: Passage) -> bool:
        """Pass a stream on, to its end. False: it broke, and ended with an error event."""
        exchange, placement, downstream = passage.exchange, passage.placement, passage.downstream
        sift, watch = passage.sift, FailureWatch()
        data, passed_last = passage.begun, b""
        try:
            while data := data or await exchange.in_time(passage.upstream.read_any()):
                placement.replica.breaker.on_answer()
                watch.feed(data)
                if passed := data if sift is None else sift(data):
                    passed_last = passed
                    await downstream.write(passed)
                if exchange.trial is not None:
                    exchange.trial.feed(data)
                data = b""
        except UPSTREAM_ERRORS as error:
            if passed_last and not passed_last.endswith((b"\n\n", b"\r\n\r\n")):
                await downstream.write(b"\n\n")  # or the error would be the rest of an event that broke off
            if exchange.has_expired and isinstance(error, TimeoutError):
                await exchange.end_late(downstream)
                return False
            why = "its caller read too slowly"
            if not downstream.was_slow:
                why = note_failure(placement.replica, error)
                if exchange.trial is not None:
                    exchange.trial.fail()
            await self._end_with_error(exchange, placement.replica, why, downstream)
            return False
        if (status := watch.status()) is not None:
            self._note_told_failure(exchange, placement.replica, status, has_answer=watch.has_answer)
        else:
            placement.replica.breaker.on_success()
            if exchange.trial is not None:
                exchange.trial.was_hindered = downstream.was_slow
                exchange.trial.end()
        return True

    async def _carry_frames(self, passage: Passage) -> bool:
        """Pass a framed stream on, as `_carry` does, and have another replica go on with it where this one fails."""
        exchange, placement = passage.exchange, passage.placement
        stream = FramedStream(passage.downstream, passage.sift, exchange.trial, exchange.blamed)
        await stream.follow(placement, passage.upstream)
        if exchange.trial is not None:
            stream.tell(exchange.trial)
        failure_events, cause = b"", _Break(placement.replica, stream.why, time.monotonic())
        while not (stream.reader.finished or stream.is_late) and self._may_go_on(exchange, stream):
            placement.release()
            exchange.avoid.add(placement.replica.url)
            failure_events = stream.reader.failure_events or failure_events
            stream.start_over()
            other = await self._place_again(exchange)
            if other is None:
                break
            placement = other
            try:
                if await self._go_on(exchange, placement, stream, cause):
                    cause = _Break(placement.replica, stream.why, time.monotonic())
            finally:
                placement.release()
        if stream.is_late or (exchange.has_expired and not stream.reader.finished):
            await exchange.end_late(passage.downstream, stream.reader.failure_events)
        elif not stream.reader.finished:
            exchange.account.lose()
            await self._end_with_error(exchange, placement.replica, stream.why, passage.downstream, failure_events)
        return stream.reader.finished

    @staticmethod
    def _may_go_on(exchange: Exchange, stream: FramedStream) -> bool:
        """Count that a stream broke; return whether another replica may be tried."""
        if exchange.has_expired:
            return False
        if stream.num_tokens - stream.num_tokens_before >= _PROGRESS_TOKENS:
            exchange.note_progress()
        exchange.num_failures += 1
        exchange.num_breaks += 1
        return exchange.num_failures <= MAX_ATTEMPTS and exchange.num_breaks <= _MAX_BREAKS

    async def _place_again(self, exchange: Exchange) -> Placement | None:
        urgency = dataclasses.replace(exchange.urgency, first_token_by=None)  # the caller has had it
        wish = Wish(exchange.query, urgency, exchange.avoid, must_frame=True, counted_here=exchange.is_counted_here)
        try:
            return await self._dispatcher.acquire(wish)
        except PenstockError:
            return None

    async def _go_on(self, exchange: Exchange, placement: Placement, stream: FramedStream, cause: _Break) -> bool:
        """Have a replica go on with a stream behind what the caller has seen; return whether it did."""
        has_moved = False
        body = exchange.with_time_left(stream.continuation(exchange.replica_body()), has_begun=stream.has_begun)
        try:
            async with await self._open(exchange, placement, body, stream.lease) as upstream:
                if upstream.status != 200 or upstream.headers.get(FRAMES_HEADER) is None:
                    code = error_code(await read_error(upstream.read))
                    stream.why = f"it answered {upstream.status} {code}".rstrip()
                    if code in (LimitReached.code, DeadlineExceeded.code):
                        return False  # the tenant's, and not the replica's
                    if upstream.status == 429:
                        self._dispatcher.note_full(placement.replica, retry_after_seconds(upstream.headers))
                    else:
                        note_refusal(placement.replica, upstream.status, code, exchange.blamed)
                    return False
                has_moved = True
                self._note_moved(exchange, placement, stream, cause)
                self._note_prompt(exchange, placement, upstream)
                await stream.follow(placement, upstream)
        except UPSTREAM_ERRORS as error:
            stream.why = note_failure(placement.replica, error, exchange.blamed)
        return has_moved

    def _note_moved(self, exchange: Exchange, placement: Placement, stream: FramedStream, cause: _Break) -> None:
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
        self, exchange: Exchange, failed: Replica, why: str, downstream: Downstream, events: bytes = b""
    ) -> None:
        self._note_lost(exchange, failed, why)
        reply = reply_for(EngineFailed("the replica failed while it answered, and none could go on; try again"))
        exchange.record.error_code = reply.code
        await downstream.write(events or b"data: %b\n\n" % reply.body)
        await downstream.end()

    # ------------------------------------------------------------ notes

    def _note_lost(self, exchange: Exchange, failed: Replica, why: str) -> None:
        self._metrics.resumptions.labels("lost").inc()
        self._log.write(
            "a stream is lost: nobody could go on with it", level=logging.ERROR, failed=failed.name, reason=why,
            request_id=exchange.record.request_id,
        )  # fmt: skip

    def _note_told_failure(self, exchange: Exchange, replica: Replica, status: int, *, has_answer: bool) -> None:
        """Take in that a stream ended with an error of the replica's own: its caller has seen it."""
        if status >= 500:  # others are the caller's own mistake or limit
            exchange.record.error_code = EngineFailed.code
            if exchange.trial is not None:
                exchange.trial.fail()
            self._note_lost(exchange, replica, "it ended a stream with an error")
        if not has_answer:
            exchange.account.fail(exchange.record, status)

    def _end_trial(self, exchange: Exchange) -> None:
        trial, exchange.trial = exchange.trial, None
        if trial is not None:
            path, seconds = exchange.request.rel_url.raw_path, trial.seconds
            copy = ShadowCopy(path, exchange.body, exchange.streams, exchange.seed, seconds)
            # Not now: the caller's answer goes first.
            asyncio.get_running_loop().call_soon(self._trials.end, exchange.query, trial, copy)

    @staticmethod
    def _note_first_byte(
        exchange: Exchange, placement: Placement, upstream: Answer, *, is_first_token: bool = False
    ) -> None:
        decision = exchange.decision
        exchange.record.ttft_seconds = decision.ttft_seconds = time.monotonic() - exchange.record.arrival
        note = Proxy._note_prompt(exchange, placement, upstream)
        if is_first_token or not exchange.streams:
            placement.note_first_byte(note, is_first_token=is_first_token)

    @staticmethod
    def _note_prompt(exchange: Exchange, placement: Placement, upstream: Answer) -> PromptNote | None:
        """Take what the replica that answers tells of the caller's prompt: the last to answer has the word."""
        placement.is_answered = True
        note = decode_note(upstream.headers.get(PROMPT_HEADER, ""))
        if note is not None:
            exchange.decision.prompt_tokens, exchange.decision.cached_tokens = note.num_tokens, note.num_cached_tokens
        return note

    @staticmethod
    def _note_closed(exchange: Exchange, replica: Replica, status: int) -> None:
        """Say that a replica does not take a request which this gateway let in."""
        if not replica.adapter.counts_usage:
            message = f"a replica answers {status} to the gateway's own key: give key_file a key that it takes"
        elif exchange.has_keys:
            message = f"a replica answers {status} to a key that this gateway knows: give both the same store or keys"
        else:
            return  # the caller's own key, of which only the replica knows
        replica.log.write(message, level=logging.WARNING, replica=replica.name, tenant=exchange.record.tenant)

    def _note_failure(self, exchange: Exchange, placement: Placement, reply: ErrorReply) -> None:
        if exchange.trial is not None:
            exchange.trial.fail()
        exchange.num_failures += 1
        exchange.refusal = reply
        exchange.avoid.add(placement.replica.url)
