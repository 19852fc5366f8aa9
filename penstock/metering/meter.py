"""Admits requests within their tenants' limits, and books what they used.

A tenant without limits is admitted without asking anybody; its usage is booked all the same. The store is asked in a
thread, never in the event loop. Knows nothing of HTTP but the names of headers.
"""

import asyncio
import dataclasses
import time
from collections.abc import Mapping
from concurrent.futures import Executor

from penstock.errors import EngineUnavailable, LimitReached, Overloaded, StoreUnavailable
from penstock.metering.books import Books
from penstock.metering.counts import StoreMetrics
from penstock.protocol.errors import CATALOGUE
from penstock.request import Tier
from penstock.store.buckets import Bucket
from penstock.store.ledger import day_of
from penstock.store.quotas import RENEW_SECONDS, Lease, Need, QuotaStore, Refusal, Spent
from penstock.telemetry import RequestRecord
from penstock.tenants import Caller, Usage

_REFUSED = frozenset({Overloaded.code, LimitReached.code})
_TURNED_AWAY = frozenset({Overloaded.code, EngineUnavailable.code})
_MAX_WAIT_SECONDS = 1.0


class Charge:
    """One admitted request's account. Close it once, whatever became of the request."""

    def __init__(self, meter: "Meter", tenant: str, model: str, lease: Lease | None) -> None:
        self.headers = rate_limit_headers(lease.standing) if lease is not None else {}
        self._meter = meter
        self._tenant = tenant
        self._model = model
        self._lease = lease
        self._written: asyncio.Future[None] | None = None

    @property
    def lease_id(self) -> str | None:
        """What another server may go on with this request by."""
        return self._lease.id if self._lease is not None else None

    def leave_lease(self, record: RequestRecord) -> None:
        """Book a failure alone: whoever goes on with the answer takes the lease over and books all of it.

        Where nobody does, the lease runs out.
        """
        if self._written is None:
            self._meter.forget(self._lease)
            failed = dataclasses.replace(record, output_tokens=0)
            self._written = self._meter.book(usage_of(failed, self._tenant, self._model), None)

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

        A store that does not answer is not waited for: the entry is kept and written later.
        """
        self.close(record)
        assert self._written is not None
        await asyncio.wait((self._written,), timeout=_MAX_WAIT_SECONDS)


class Meter:
    """The limits and the books of one process; without a store it notes nothing, and nobody with limits gets in."""

    def __init__(
        self, metrics: StoreMetrics, *, thread: Executor, quotas: QuotaStore | None = None, books: Books | None = None
    ) -> None:
        self._metrics = metrics
        self._thread = thread
        self._quotas = quotas
        self._books = books
        self._held: dict[str, str] = {}  # tenants by the ids of leases

    async def admit(self, caller: Caller, model: str, need: Need, *, instead_of: str | None = None) -> Charge:
        """Reserve what a request may use. Raises LimitReached, LimitTooSmall or StoreUnavailable.

        `instead_of` is the lease of an answer that a server which failed has begun.
        """
        if not caller.terms.limits.are_metered:
            return Charge(self, caller.tenant, model, None)
        if self._quotas is None:
            raise StoreUnavailable("this key has limits, and the server was started without a store to count in")
        loop = asyncio.get_running_loop()
        outcome = await loop.run_in_executor(self._thread, self._quotas.admit, caller, need, instead_of)
        if isinstance(outcome, Refusal):
            if need.tier is Tier.ONLINE:  # a batch only waits
                self._metrics.count_limit_refusal(outcome.limit)
                self.book_refusal(caller.tenant, model)
            raise LimitReached(
                outcome.limit,
                outcome.most,
                retry_after_seconds=outcome.retry_after_seconds,
                headers=rate_limit_headers(outcome.standing),
            )
        if outcome.tier is Tier.ONLINE:
            self._held[outcome.id] = outcome.tenant
        return Charge(self, caller.tenant, model, outcome)

    def book_refusal(self, tenant: str, model: str) -> None:
        """Note a request that got no answer for a limit or a full queue."""
        self.book(Usage(tenant=tenant, model=model, day=day_of(time.time()), refused=1), None)

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


def _settlement(lease: Lease | None, record: RequestRecord) -> tuple[Lease, Spent] | None:
    return None if lease is None else (lease, spent_by(record))


def spent_by(record: RequestRecord) -> Spent:
    """Return what a request that has ended counts for against its tenant's limits."""
    if record.output_tokens == 0 and record.error_code in _TURNED_AWAY:
        return Spent(requests=0)
    if record.output_tokens == 0 and record.error_code:
        return Spent()
    # Also of one whose caller left: its prompt was read.
    return Spent(input_tokens=record.prompt_tokens, output_tokens=record.output_tokens)


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
        errors=int(kind is not None and kind.status >= 500),
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
