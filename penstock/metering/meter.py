"""Admits requests within their tenants' limits, and books what they used.

A tenant without limits is admitted without asking anybody; its usage is booked all the same. The store is asked in a
thread, never in the event loop. Knows nothing of HTTP but the names of headers.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import TypeVar

from penstock.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    LimitReached,
    LimitTooSmall,
    Overloaded,
    RequestError,
    StoreUnavailable,
)
from penstock.metering.books import Books
from penstock.metering.counts import StoreMetrics
from penstock.metering.store_thread import StoreThread
from penstock.protocol.errors import CATALOGUE
from penstock.request import Tier
from penstock.store.buckets import Bucket
from penstock.store.ledger import day_of
from penstock.store.quotas import RENEW_SECONDS, Ask, Glance, Lease, Need, QuotaStore, Refusal, Spent, Ticket
from penstock.telemetry import RequestRecord
from penstock.tenants import Caller, Usage

_REFUSED = frozenset({Overloaded.code, LimitReached.code})
_TURNED_AWAY = frozenset({Overloaded.code, EngineUnavailable.code})
_MAX_WAIT_SECONDS = 1.0
# A store that has not answered by then is told as one that does not work. Far longer than it takes on a busy machine.
STORE_SECONDS = 2.0

Result = TypeVar("Result")


class Charge:
    """One admitted request's account. Close it once, whatever became of the request."""

    def __init__(
        self, meter: "Meter", caller: Caller, model: str, lease: Lease | None, deadline: float | None = None
    ) -> None:
        self.headers = rate_limit_headers(lease.standing) if lease is not None else {}
        self._meter = meter
        self._tenant = caller.tenant
        # Only a gateway that vouches for its requests may take a lease elsewhere: any other caller could hold on to
        # the answer that it belongs to.
        self._may_move = caller.voucher is not None
        self._model = model
        self._lease = lease
        self._deadline = deadline
        self._written: asyncio.Future[None] | None = None

    @property
    def ticket(self) -> str | None:
        """What another server may go on with this request by."""
        return str(self._lease.ticket) if self._lease is not None and self._may_move else None

    def leave(self, record: RequestRecord) -> None:
        """Close it for an answer that another server is to go on with, and to book whole.

        What moves is not booked here; where nobody takes its lease over, that runs out. What may not move will be
        another request: this one's limits are settled, and a failure alone is booked.
        """
        if self._written is not None:
            return
        if self._may_move:
            self._meter.forget(self._lease)
            self._written = self._meter.book(None, None)
        else:
            failed = dataclasses.replace(record, output_tokens=0)
            usage = usage_of(failed, self._tenant, self._model)
            self._written = self._meter.book(usage, _settlement(self._lease, record))

    def give_up(self, record: RequestRecord, *, goes_on: bool) -> None:
        """Close it for a request that was taken away while this server stood still.

        A gateway that vouches for it asks another server: to go on with what was sent of it, or for all of it.
        """
        if not self._may_move:
            self.close(record)
        elif goes_on:
            self.leave(record)
        else:
            self.withdraw()

    def close(self, record: RequestRecord) -> None:
        """Book the outcome that the record tells of. Only the first time counts."""
        if self._written is None:
            settlement = _settlement(self._lease, record)
            self._written = self._meter.book(usage_of(record, self._tenant, self._model), settlement)

    def hand_over(self, record: RequestRecord) -> tuple[Usage, tuple[Lease, Spent] | None]:
        """Close it without booking: return what the caller then books itself, with whatever belongs to it."""
        assert self._written is None, "an account is closed once"
        self._written = asyncio.get_running_loop().create_future()
        self._written.set_result(None)
        self._meter.forget(self._lease)
        return usage_of(record, self._tenant, self._model), _settlement(self._lease, record)

    def withdraw(self) -> None:
        """Close it as if the request had never been admitted, unless it is closed."""
        if self._written is None:
            settlement = (self._lease, Spent(requests=0)) if self._lease is not None else None
            self._written = self._meter.book(None, settlement)

    async def closed(self, record: RequestRecord) -> None:
        """Book the outcome and wait until it is written, so that nothing that was answered can be lost.

        A store that does not answer, or not before the caller's deadline, is not waited for: the entry is kept and
        written later.
        """
        self.close(record)
        assert self._written is not None
        left = _MAX_WAIT_SECONDS if self._deadline is None else self._deadline - time.monotonic()
        await asyncio.wait((self._written,), timeout=max(0.0, min(left, _MAX_WAIT_SECONDS)))


class Meter:
    """The limits and the books of one process; without a store it notes nothing, and nobody with limits gets in."""

    def __init__(
        self,
        metrics: StoreMetrics,
        *,
        thread: StoreThread,
        look_thread: StoreThread,
        quotas: QuotaStore | None = None,
        books: Books | None = None,
    ) -> None:
        """`thread` writes; `look_thread` only reads, so that no look waits for a writer."""
        self._metrics = metrics
        self._thread = thread
        self._look_thread = look_thread
        self._quotas = quotas
        self._books = books
        self._held: dict[str, str] = {}  # tenants by the ids of leases

    @contextlib.asynccontextmanager
    async def preparing(
        self, caller: Caller, model: str, least: Need, *, likely_input_tokens: int
    ) -> AsyncIterator[None]:
        """Where a request's prompt is made, which costs: not entered by one that its tenant's limits refuse already.

        What turns out to be wrong with it in there has cost as much as a request, and counts as one. Raises as `admit`.
        """
        await self.look(caller, model, least, likely_input_tokens=likely_input_tokens)
        try:
            yield
        except Overloaded:
            if least.tier is Tier.ONLINE:
                self.book_refusal(caller.tenant, model)
            raise
        except (RequestError, DeadlineExceeded):
            await self._count_request(caller, least.tier)
            raise

    async def admit(self, caller: Caller, model: str, need: Need, *, deadline: float | None = None) -> Charge:
        """Reserve what a request may use, or take over what a server which failed had reserved for it.

        Behind its deadline, a moment of `time.monotonic`, nothing waits for the store. Raises LimitReached,
        LimitTooSmall or StoreUnavailable.
        """
        if not caller.terms.limits.are_metered:
            return Charge(self, caller, model, None, deadline)
        lease = caller.voucher.lease if caller.voucher is not None else None
        instead_of = Ticket.parse(lease) if lease is not None else None
        with self._failure_booked(caller, model, need.tier):
            quotas = self._limits_store()
            job = self._thread.submit_among(caller.tenant, quotas.admit, Ask(caller, need, instead_of))
            outcome = await self._answer(job, too_late=self._give_back)
        if isinstance(outcome, LimitTooSmall):
            await self._count_request(caller, need.tier)
            raise outcome
        if isinstance(outcome, Refusal):
            raise self._refused(caller, model, need.tier, outcome)
        if outcome.tier is Tier.ONLINE:
            self._held[outcome.id] = outcome.tenant
        return Charge(self, caller, model, outcome, deadline)

    async def look(self, caller: Caller, model: str, least: Need, *, likely_input_tokens: int = 1) -> None:
        """Raise as `admit` would for a request of which only so much is known yet."""
        moves = caller.voucher is not None and caller.voucher.lease is not None  # it may have been admitted elsewhere
        if moves or not caller.terms.limits.are_metered:
            return
        with self._failure_booked(caller, model, least.tier):
            quotas = self._limits_store()
            glance = Glance(caller, least, likely_input_tokens)
            outcome = await self._answer(self._look_thread.submit_among(caller.tenant, quotas.look, glance))
        if isinstance(outcome, LimitTooSmall):
            raise outcome
        if outcome is not None:
            raise self._refused(caller, model, least.tier, outcome)

    async def _count_request(self, caller: Caller, tier: Tier) -> None:
        """Count a request that was not admitted, where requests are counted. A store that fails does not hide why."""
        if self._quotas is None or caller.terms.limits.requests_per_minute is None or tier is Tier.BATCH:
            return
        quotas = self._quotas
        with contextlib.suppress(StoreUnavailable):
            await self._answer(self._thread.submit_for(caller.tenant, lambda: quotas.count_request(caller)))

    @contextlib.contextmanager
    def _failure_booked(self, caller: Caller, model: str, tier: Tier) -> Iterator[None]:
        """Book a request that the store's failure ends."""
        try:
            yield
        except StoreUnavailable:
            if tier is Tier.ONLINE:  # a batch only waits
                self.book_error(caller.tenant, model)
            raise

    def _limits_store(self) -> QuotaStore:
        if self._quotas is None:
            raise StoreUnavailable("this key has limits, and the server was started without a store to count in")
        return self._quotas

    async def _answer(self, job: "Future[Result]", *, too_late: Callable[[Result], None] | None = None) -> Result:
        """Wait for the store, but no longer than `STORE_SECONDS`; what it says after that goes to `too_late`."""
        waiter = asyncio.wrap_future(job)
        try:
            await asyncio.wait((waiter,), timeout=STORE_SECONDS)
        finally:
            if not waiter.done() and not job.cancel():
                waiter.add_done_callback(lambda late: _take(late, too_late))
        if not waiter.done():
            self._metrics.count_store_failure()
            raise StoreUnavailable(f"the store has not answered for {STORE_SECONDS:g} s; try again in a moment")
        try:
            return waiter.result()
        except StoreUnavailable:
            self._metrics.count_store_failure()
            raise

    def _give_back(self, outcome: Lease | Refusal | LimitTooSmall) -> None:
        """Take back what was reserved for a request that has stopped waiting for it."""
        if isinstance(outcome, Lease):
            self.book(None, (outcome, Spent(requests=0)))

    def _refused(self, caller: Caller, model: str, tier: Tier, refusal: Refusal) -> LimitReached:
        """Book a refusal; return the error that tells of it."""
        if tier is Tier.ONLINE:  # a batch only waits
            self._metrics.count_limit_refusal(refusal.limit)
            self.book_refusal(caller.tenant, model)
        return LimitReached(
            refusal.limit,
            refusal.most,
            retry_after_seconds=refusal.retry_after_seconds,
            headers=rate_limit_headers(refusal.standing),
        )

    def book_refusal(self, tenant: str, model: str) -> None:
        """Note a request that got no answer for a limit or a full queue."""
        self.book(Usage(tenant=tenant, model=model, day=day_of(time.time()), refused=1), None)

    def book_error(self, tenant: str, model: str) -> None:
        """Note a request that a failure of ours, or of a replica, left without its answer."""
        self.book(Usage(tenant=tenant, model=model, day=day_of(time.time()), errors=1), None)

    def forget(self, lease: Lease | None) -> None:
        """Renew a lease no more."""
        if lease is not None:
            self._held.pop(lease.id, None)

    def book(self, usage: Usage | None, settlement: tuple[Lease, Spent] | None) -> "asyncio.Future[None]":
        """Write an entry; the result is there when it is written."""
        if settlement is not None:
            self.forget(settlement[0])
        if self._books is not None and (usage is not None or settlement is not None):
            return self._books.note(usage, settlement)
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        written.set_result(None)
        return written

    async def keep_leases(self) -> None:
        """Renew, again and again, the leases of requests under way. Raises StoreUnavailable."""
        while self._quotas is not None:
            await asyncio.sleep(RENEW_SECONDS)
            if self._held:
                # In the thread that settles as well: what ends meanwhile is settled behind this.
                held = dict(self._held)
                await asyncio.get_running_loop().run_in_executor(self._thread, self._quotas.renew, held)


def _take(late: "asyncio.Future[Result]", take: Callable[[Result], None] | None) -> None:
    if not late.cancelled() and late.exception() is None and take is not None:
        take(late.result())


def _settlement(lease: Lease | None, record: RequestRecord) -> tuple[Lease, Spent] | None:
    return None if lease is None else (lease, spent_by(record))


def spent_by(record: RequestRecord) -> Spent:
    """Return what a request that has ended counts for against its tenant's limits."""
    if record.output_tokens == 0 and record.error_code in _TURNED_AWAY:
        return Spent(requests=0)
    if record.output_tokens == 0 and record.error_code:
        return Spent()
    # Also of one whose caller left: its prompt was read.
    is_whole = not record.error_code and record.finish != "abort"
    return Spent(input_tokens=record.prompt_tokens, output_tokens=record.output_tokens, is_whole=is_whole)


def usage_of(record: RequestRecord, tenant: str, model: str) -> Usage:
    """Return a request's ledger entry."""
    spent = spent_by(record)
    kind = CATALOGUE.get(record.error_code)
    return Usage(
        tenant=tenant,
        model=model,
        day=day_of(time.time()),
        requests=int(not record.error_code or record.output_tokens > 0),
        prompt_tokens=spent.input_tokens,
        cached_tokens=record.cached_tokens if spent.input_tokens else 0,
        output_tokens=spent.output_tokens,
        refused=int(record.error_code in _REFUSED),
        # That a caller's own deadline passed is no error of the server's.
        errors=int(kind is not None and kind.status >= 500 and record.error_code != DeadlineExceeded.code),
    )


def rate_limit_headers(standing: Mapping[str, Bucket]) -> dict[str, str]:
    """Return what OpenAI's clients read; `tokens` are input or output, whichever has the smaller share left."""
    headers: dict[str, str] = {}
    tokens = [bucket for name, bucket in standing.items() if name.endswith("tokens_per_minute")]
    named = {name.removesuffix("_per_minute").replace("_", "-"): bucket for name, bucket in standing.items()}
    if tokens:
        named["tokens"] = min(tokens, key=lambda bucket: bucket.remaining / bucket.limit)
    for name, bucket in named.items():
        headers[f"x-ratelimit-limit-{name}"] = str(bucket.limit)
        headers[f"x-ratelimit-remaining-{name}"] = str(bucket.remaining)
        headers[f"x-ratelimit-reset-{name}"] = f"{bucket.reset_seconds:.3f}s"
    return headers
