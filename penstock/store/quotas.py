"""Limits that hold across every process and machine on one store.

A request reserves its estimate when it is admitted and is settled with the truth when it ends: one transaction each.
Between the two it holds a lease, which its process renews; what a killed process held runs out, and then its estimate
stands. Settling takes the lease away, so that nothing is settled twice. A request that goes on elsewhere moves as it
is: one lease ends where the next begins, and what was reserved is neither given back nor reserved again. Knows nothing
of HTTP or the engine.
"""

import math
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, Row, delete, func, insert, select, update

from penstock.errors import LimitTooSmall
from penstock.request import Tier
from penstock.store.buckets import DAY_SECONDS, Bucket, InUse
from penstock.store.database import Database, insert_into
from penstock.store.reservations import (
    Change,
    begin_reservation,
    drop_reservations,
    end_reservation,
    move_reservation,
    note_levels,
)
from penstock.store.schema import leases, quotas
from penstock.tenants import Caller, Limits

LEASE_SECONDS = 30.0
# How often leases must be renewed, so that one missed time costs none.
RENEW_SECONDS = 10.0
# When a place among the concurrent requests will be free, nobody knows.
CONCURRENCY_RETRY_SECONDS = 1.0

_FIRST_MEAN_OUTPUT_TOKENS = 256.0
_MAX_ROWS = 1000  # in one statement
_LEARNING_RATE = 0.1
_LIKELY_PARTS = 4  # of what a prompt likely has, it has one surely
_BATCH_LIMIT = "tokens_per_day"
_NOBODY = ""  # no tenant's name: the holder of leases that were taken over
_TICKET = re.compile(r"([0-9a-f]{32})\.([0-9]{4}-[0-9]{2}-[0-9]{2})\.([0-9]{1,15})\.([0-9]{1,15})")


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What a request may use."""

    input_tokens: int
    most_output_tokens: int  # of all its answers together
    output_is_stated: bool  # else its tenant's usual answers are a better guess
    least_output_tokens: int = 0  # that all its answers together have for certain
    num_answers: int = 1
    tier: Tier = Tier.ONLINE  # batch requests run in idle capacity: of all limits only the day's tokens hold for them

    @property
    def certain_output_tokens(self) -> int:
        """What must fit whatever the guess is."""
        return self.most_output_tokens if self.output_is_stated else max(1, self.least_output_tokens)


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """What a request did use."""

    requests: int = 1  # 0: it was turned away through no fault of its tenant's
    input_tokens: int = 0
    output_tokens: int = 0
    is_whole: bool = True  # False: its answer would have been longer, had it not been cut short


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """What a request takes along to another server: its lease and what is reserved on it."""

    lease_id: str
    day: str
    input_tokens: int
    output_tokens: int

    @classmethod
    def parse(cls, text: str) -> "Ticket | None":
        found = _TICKET.fullmatch(text)
        if found is None:
            return None
        return cls(lease_id=found[1], day=found[2], input_tokens=int(found[3]), output_tokens=int(found[4]))

    def __str__(self) -> str:
        return f"{self.lease_id}.{self.day}.{self.input_tokens}.{self.output_tokens}"

    def covers(self, need: Need) -> bool:
        """Whether no more was asked for than is reserved. An estimate is one, whatever comes of it."""
        least = need.most_output_tokens if need.output_is_stated else need.least_output_tokens
        return need.tier is Tier.ONLINE and need.input_tokens <= self.input_tokens and least <= self.output_tokens


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """An admitted request's reservation."""

    id: str
    tenant: str
    limits: Limits
    day: str
    input_tokens: int
    output_tokens: int
    num_answers: int
    output_is_stated: bool
    tier: Tier
    standing: dict[str, Bucket]  # after the reservation, by the limit's name

    @property
    def ticket(self) -> Ticket:
        return Ticket(lease_id=self.id, day=self.day, input_tokens=self.input_tokens, output_tokens=self.output_tokens)


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request is not admitted now, and when it would be if nothing else came."""

    limit: str
    most: int
    retry_after_seconds: float
    standing: dict[str, Bucket]


class Ask(NamedTuple):
    """A request that wants to be admitted. Who goes on with an answer has the ticket of the server that had it."""

    caller: Caller
    need: Need
    instead_of: Ticket | None = None


class Glance(NamedTuple):
    """A request of which it is asked, before its prompt is counted, whether it would be refused now."""

    caller: Caller
    least: Need  # what is certain of it
    likely_input_tokens: int


class QuotaStore:
    """The limits of all tenants."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def admit(self, asks: Sequence[Ask]) -> list[Lease | Refusal | LimitTooSmall]:
        """Reserve what requests of one tenant may use, one after the other, in one transaction.

        LimitTooSmall is for one that no wait would let in. One with a ticket moves where that lease is still held and
        nothing more is asked for than is reserved on it: it was admitted then and is not refused now, and nothing is
        added. Else it is a request like any other. Tickets are believed: take them from those only who are known not
        to let an answer run in two places.
        """
        (tenant,) = {ask.caller.tenant for ask in asks}
        with self._database.writing() as connection:
            in_use = _lock(connection, tenant, self._database)
            now = self._database.now(connection)
            is_set_back = now < in_use.at
            in_use.move_to(now, asks[0].caller.terms.limits)
            _end_leases(connection, tenant, in_use.at)
            note_levels(connection, tenant, in_use)
            outcomes = [_admit(connection, ask, in_use, now) for ask in asks]
            # Set back, the buckets would else leak again only when the clock has caught up.
            if is_set_back or any(isinstance(outcome, Lease) for outcome in outcomes):
                _write(connection, tenant, in_use)
        return outcomes

    def look(self, glances: Sequence[Glance]) -> list[Refusal | LimitTooSmall | None]:
        """Return why each of a tenant's requests would be refused now, if it were the only one. Changes nothing.

        Of the minute's input one is taken to need a part at least of what is likely; the wait is told for all of that,
        so that whoever comes back then is seldom told to wait once more. LimitTooSmall is for one that no wait would
        let in.
        """
        (tenant,) = {glance.caller.tenant for glance in glances}
        with self._database.reading() as connection:
            row = connection.execute(select(quotas).where(quotas.c.tenant == tenant)).first()
            now = self._database.now(connection)
            in_use = InUse(at=now) if row is None else _in_use(row)
            is_set_back = now < in_use.at
            if not is_set_back:
                in_use.move_to(now, glances[0].caller.terms.limits)
            counted = [item for item in glances if item.caller.terms.limits.concurrent_requests is not None]
            num_running = _count_running(connection, counted[0].caller, now) if counted else 0
        # Only who may write can let time go on after a clock was set back.
        return [_foreseen(glance, None if is_set_back else in_use, num_running) for glance in glances]

    def count_request(self, caller: Caller) -> None:
        """Count a request that ended before it could be admitted: it was read, so it is one."""
        with self._database.writing() as connection:
            in_use = _lock(connection, caller.tenant, self._database)
            in_use.move_to(self._database.now(connection), caller.terms.limits)
            note_levels(connection, caller.tenant, in_use)
            in_use.add(requests=1, input_tokens=0, output_tokens=0, day=in_use.day)
            _write(connection, caller.tenant, in_use)

    def renew(self, held: Mapping[str, str]) -> None:
        """Keep leases, tenants by the leases' ids, from running out; one that a clock set forward ended begins anew."""
        items = sorted(held.items())
        for start in range(0, len(items), _MAX_ROWS):
            some = items[start : start + _MAX_ROWS]
            with self._database.writing() as connection:
                expires_at = self._database.now(connection) + LEASE_SECONDS
                rows = [{"id": lease, "tenant": tenant, "expires_at": expires_at} for lease, tenant in some]
                renewed = insert_into(connection, leases, rows)
                newer, still_theirs = {"expires_at": expires_at}, leases.c.tenant == renewed.excluded.tenant
                connection.execute(renewed.on_conflict_do_update(index_elements=["id"], set_=newer, where=still_theirs))


def _foreseen(glance: Glance, in_use: InUse | None, num_running: int) -> Refusal | LimitTooSmall | None:
    """Return why a request would be refused, as far as can be known. Without `in_use` nothing is known of others."""
    caller, least, likely_input_tokens = glance
    limits = caller.terms.limits
    try:
        _check_fits(limits, least)
    except LimitTooSmall as error:
        return error
    if in_use is None:
        return None
    output_tokens = _estimate(limits, least, in_use.mean_output_tokens)
    refusal = _refusal(limits, in_use, least, output_tokens, num_running)
    most = limits.input_tokens_per_minute
    if most is None or least.tier is Tier.BATCH:
        return refusal
    bucket = Bucket(most, in_use.input_tokens)
    if refusal is None and not bucket.wait_seconds(min(most, likely_input_tokens // _LIKELY_PARTS)):
        return None
    wait = bucket.wait_seconds(min(most, max(least.input_tokens, likely_input_tokens)))
    if refusal is not None and wait <= refusal.retry_after_seconds:
        return refusal
    wait = math.ceil(wait * 1000) / 1000
    standing = in_use.buckets(limits)
    return Refusal(limit="input_tokens_per_minute", most=most, retry_after_seconds=wait, standing=standing)


def _admit(connection: Connection, ask: Ask, in_use: InUse, now: float) -> Lease | Refusal | LimitTooSmall:
    """Reserve for one request in `in_use`, and write its lease."""
    caller, need, ticket = ask
    limits, lease_id = caller.terms.limits, uuid.uuid4().hex
    if ticket is not None and ticket.covers(need) and _end_claim(connection, caller, ticket, now):
        move_reservation(connection, ticket.lease_id, lease_id)
        day, input_tokens, output_tokens = ticket.day, ticket.input_tokens, ticket.output_tokens
    else:
        try:
            _check_fits(limits, need)
        except LimitTooSmall as error:
            return error
        day, input_tokens = in_use.day, need.input_tokens
        output_tokens = _estimate(limits, need, in_use.mean_output_tokens)
        num_running = _count_running(connection, caller, in_use.at)
        refusal = _refusal(limits, in_use, need, output_tokens, num_running)
        if refusal is not None:
            return refusal
        if need.tier is Tier.BATCH:
            in_use.add_to_day(input_tokens + output_tokens, day)
        else:
            in_use.add(requests=1, input_tokens=input_tokens, output_tokens=output_tokens, day=day)
            begin_reservation(connection, lease_id, caller.tenant, in_use)
    lease = Lease(
        id=lease_id,
        tenant=caller.tenant,
        limits=limits,
        day=day,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        num_answers=need.num_answers,
        output_is_stated=need.output_is_stated,
        tier=need.tier,
        standing=in_use.buckets(limits),
    )
    if need.tier is Tier.ONLINE:  # only those are counted; and who records a batch's results settles them once
        row = {"id": lease.id, "tenant": caller.tenant, "expires_at": in_use.at + LEASE_SECONDS}
        connection.execute(insert(leases).values(row))
    return lease


def settle(database: Database, connection: Connection, ended: Iterable[tuple[Lease, Spent]]) -> None:
    """Replace reservations by what was used, within the caller's transaction.

    A lease that had run out is left as it was reserved, and one that was taken over is its heir's to settle.
    """
    # Tenants in one order everywhere, so that no two writers wait for each other.
    by_tenant = sorted(ended, key=lambda item: item[0].tenant)
    for tenant, group in groupby(by_tenant, key=lambda item: item[0].tenant):
        in_use = _lock(connection, tenant, database)
        now = database.now(connection)
        for lease, spent in group:
            in_use.move_to(now, lease.limits)
            note_levels(connection, tenant, in_use)
            if lease.tier is Tier.BATCH:
                unused = lease.input_tokens + lease.output_tokens - spent.input_tokens - spent.output_tokens
                in_use.add_to_day(-unused, lease.day)
            elif _end_lease(connection, lease):
                _apply(connection, in_use, lease, spent)
        _write(connection, tenant, in_use)


def _end_lease(connection: Connection, lease: Lease) -> bool:
    """Take a lease away; return whether it was still its tenant's."""
    own = delete(leases).where(leases.c.id == lease.id, leases.c.tenant == lease.tenant)
    return bool(connection.execute(own).rowcount)


def _apply(connection: Connection, in_use: InUse, lease: Lease, spent: Spent) -> None:
    input_tokens, output_tokens = spent.input_tokens - lease.input_tokens, spent.output_tokens - lease.output_tokens
    change = end_reservation(connection, lease.id, Change(spent.requests - 1, input_tokens, output_tokens))
    in_use.add_to_minute(**change._asdict())
    in_use.add_to_day(input_tokens + output_tokens, lease.day)
    # How long answers become that nobody limits, only such answers tell; one that was cut short, that they are longer.
    if spent.output_tokens and not lease.output_is_stated:
        mean = _FIRST_MEAN_OUTPUT_TOKENS if in_use.mean_output_tokens is None else in_use.mean_output_tokens
        length = spent.output_tokens / lease.num_answers
        if spent.is_whole or length > mean:
            in_use.mean_output_tokens = mean + _LEARNING_RATE * (length - mean)


def _check_fits(limits: Limits, need: Need) -> None:
    """Raise where the request would not fit even if nothing else were in use."""
    output = need.certain_output_tokens
    named = "max_tokens"
    if need.least_output_tokens and not need.output_is_stated:
        named = "n" if need.least_output_tokens == need.num_answers > 1 else "min_tokens"
    amounts = (
        ("input_tokens_per_minute", limits.input_tokens_per_minute, need.input_tokens, None),
        ("output_tokens_per_minute", limits.output_tokens_per_minute, output, named),
        ("tokens_per_day", limits.tokens_per_day, need.input_tokens + output, named),
    )
    for name, most, amount, param in amounts:
        if need.tier is Tier.BATCH and name != _BATCH_LIMIT:
            continue
        if most is not None and amount > most:
            raise LimitTooSmall(name, most, amount, param=param)


def _estimate(limits: Limits, need: Need, mean_output_tokens: float | None) -> int:
    if need.output_is_stated:
        return need.most_output_tokens
    mean = _FIRST_MEAN_OUTPUT_TOKENS if mean_output_tokens is None else mean_output_tokens
    guesses = [need.most_output_tokens, math.ceil(mean) * need.num_answers]
    # A guess must not make a request wait for ever.
    if limits.output_tokens_per_minute is not None and need.tier is Tier.ONLINE:
        guesses.append(limits.output_tokens_per_minute)
    if limits.tokens_per_day is not None:
        guesses.append(limits.tokens_per_day - need.input_tokens)
    return max(need.least_output_tokens, min(guesses))


def _refusal(limits: Limits, in_use: InUse, need: Need, output_tokens: int, num_running: int) -> Refusal | None:
    waits = in_use.waits(limits, input_tokens=need.input_tokens, output_tokens=output_tokens)
    if need.tier is Tier.BATCH:
        waits = {name: seconds for name, seconds in waits.items() if name == _BATCH_LIMIT}
    elif limits.concurrent_requests is not None:
        is_full = num_running >= limits.concurrent_requests
        waits["concurrent_requests"] = CONCURRENCY_RETRY_SECONDS if is_full else 0.0
    longest = max(waits, key=lambda name: waits[name], default=None)
    if longest is None or waits[longest] <= 0:
        return None
    return Refusal(
        limit=longest,
        most=getattr(limits, longest),
        retry_after_seconds=waits[longest],
        standing=in_use.buckets(limits),
    )


def _count_running(connection: Connection, caller: Caller, now: float) -> int:
    """Return how many requests hold leases, where anybody wants to know."""
    if caller.terms.limits.concurrent_requests is None:
        return 0
    held = (leases.c.tenant == caller.tenant, leases.c.expires_at > now)
    return int(connection.execute(select(func.count()).select_from(leases).where(*held)).scalar_one())


def _end_leases(connection: Connection, tenant: str, now: float) -> None:
    """Take away leases that have run out."""
    own, latest = leases.c.tenant == tenant, now + LEASE_SECONDS
    if connection.execute(delete(leases).where(own, leases.c.expires_at <= now)).rowcount:
        drop_reservations(connection, tenant, select(leases.c.id).where(own))
    # A lease that seems longer is from before the clock was set back. Who still holds it renews it; else it runs out.
    connection.execute(update(leases).where(own, leases.c.expires_at > latest).values(expires_at=latest))


def _end_claim(connection: Connection, caller: Caller, ticket: Ticket, now: float) -> bool:
    """End a tenant's claim to a lease; return whether it was still held. Each can be taken over once.

    Its row stays for a day, nobody's: a holder that lives all the same can neither renew nor settle it any more.
    """
    connection.execute(delete(leases).where(leases.c.tenant == _NOBODY, leases.c.expires_at <= now))
    own = (leases.c.id == ticket.lease_id, leases.c.tenant == caller.tenant, leases.c.expires_at > now)
    ended = update(leases).where(*own).values(tenant=_NOBODY, expires_at=now + DAY_SECONDS)
    return bool(connection.execute(ended).rowcount)


def _lock(connection: Connection, tenant: str, database: Database) -> InUse:
    """Return a tenant's row, and keep every other writer from it until the transaction ends."""
    wanted = select(quotas).where(quotas.c.tenant == tenant).with_for_update()
    row = connection.execute(wanted).first()
    if row is None:
        first = msgspec.structs.asdict(InUse(at=database.now(connection)))
        connection.execute(insert_into(connection, quotas, {"tenant": tenant, **first}).on_conflict_do_nothing())
        row = connection.execute(wanted).one()
    return _in_use(row)


def _in_use(row: Row[Any]) -> InUse:
    values = dict(row._mapping)
    del values["tenant"]
    return InUse(**values)


def _write(connection: Connection, tenant: str, in_use: InUse) -> None:
    values = msgspec.structs.asdict(in_use)
    connection.execute(update(quotas).where(quotas.c.tenant == tenant).values(values))
