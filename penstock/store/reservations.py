"""What of a reservation can still be given back, for each request under way.

A bucket leaks, and with it what was reserved: who gives back what has leaked already gives it twice. So of each request
the least is kept that was in each bucket since it was admitted. With no more than that taken away, the bucket holds
what it would hold had so much less been reserved to begin with. Knows nothing of limits, leases or the day's tokens.
"""

from typing import NamedTuple

from sqlalchemy import Connection, Select, case, delete, insert, or_, select, update

from penstock.store.buckets import InUse
from penstock.store.schema import reservations


class Change(NamedTuple):
    """What is added to each bucket; less than nothing is taken away."""

    requests: float
    input_tokens: float
    output_tokens: float


def begin_reservation(connection: Connection, lease_id: str, tenant: str, in_use: InUse) -> None:
    """Keep a request that was just added to what is in use."""
    connection.execute(
        insert(reservations).values(lease_id=lease_id, tenant=tenant, began_at=in_use.at, **_levels(in_use))
    )


def note_levels(connection: Connection, tenant: str, in_use: InUse) -> None:
    """Remember what is in use, before anything is added to it."""
    levels = _levels(in_use)
    higher = {name: reservations.c[name] > level for name, level in levels.items()}
    values = {name: case((higher[name], level), else_=reservations.c[name]) for name, level in levels.items()}
    connection.execute(
        update(reservations).where(reservations.c.tenant == tenant, or_(*higher.values())).values(values)
    )


def move_reservation(connection: Connection, lease_id: str, next_lease_id: str) -> None:
    """Have another lease go on with it."""
    connection.execute(update(reservations).where(reservations.c.lease_id == lease_id).values(lease_id=next_lease_id))


def end_reservation(connection: Connection, lease_id: str, change: Change) -> Change:
    """Forget a request that is settled; return the change that it may make. The levels of now were noted."""
    own = reservations.c.lease_id == lease_id
    row = connection.execute(select(reservations).where(own)).first()
    if row is None:  # it had run out meanwhile
        return Change(*[max(0.0, amount) for amount in change])
    connection.execute(delete(reservations).where(own))
    allowed = Change(*[max(amount, -row._mapping[name]) for name, amount in change._asdict().items()])
    values = {}
    for name, amount in allowed._asdict().items():
        if amount < 0:
            column, least = reservations.c[name], row._mapping[name] + amount
            # As if less had been reserved: those behind it had so much less below them all the time; those before it,
            # only since then.
            is_behind = reservations.c.began_at >= row.began_at
            values[name] = case((is_behind, column + amount), (column > least, least), else_=column)
    if values:
        connection.execute(update(reservations).where(reservations.c.tenant == row.tenant).values(values))
    return allowed


def drop_reservations(connection: Connection, tenant: str, kept_lease_ids: Select[tuple[str]]) -> None:
    """Forget a tenant's requests but those of these leases."""
    gone = reservations.c.lease_id.not_in(kept_lease_ids)
    connection.execute(delete(reservations).where(reservations.c.tenant == tenant, gone))


def _levels(in_use: InUse) -> dict[str, float]:
    return {name: getattr(in_use, name) for name in Change._fields}
