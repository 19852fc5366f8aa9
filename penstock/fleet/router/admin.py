"""The admin routes: who is behind the gateway, who wants to be, and why requests went where they went."""

from collections.abc import Awaitable, Callable, Sequence

import msgspec
from aiohttp import web

from penstock.errors import ConfigError, RequestError, UnknownModel
from penstock.fleet.autoscaler.autoscaler import Autoscaler
from penstock.fleet.autoscaler.report import report, report_all
from penstock.fleet.config import ReplicaEntry
from penstock.fleet.discovery.registration import Registration
from penstock.fleet.fleet_file import check_entry
from penstock.fleet.introduction import Introductions
from penstock.fleet.replica import Replica, ReplicaPool
from penstock.fleet.router.admin_route import AdminRoute, ReadBody
from penstock.fleet.router.decisions import Decision, DecisionLog

_DEFAULT_DECISIONS = 50


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as the gateway sees it."""

    url: str
    kind: str
    version: str
    models: list[str]
    standing: str
    reason: str
    next_try_seconds: float | None  # of one that is ejected: in how long it is asked again
    store: str  # that it counts in: shared with this gateway, other, none or unknown
    counted_by: str  # who admits and books its requests: replica, gateway or nobody
    in_flight: int
    running: float
    waiting: float
    kv_utilization: float
    full: bool
    standby: bool  # ready, and sent nothing until the autoscaler needs it
    ejections: int


class Lease(msgspec.Struct, frozen=True):
    """How long a registration lasts without another."""

    lease_seconds: float


class ReplicaReports(msgspec.Struct, frozen=True):
    replicas: list[ReplicaReport]


class Decisions(msgspec.Struct, frozen=True):
    decisions: list[Decision]


def admin_routes(
    pool: ReplicaPool,
    registration: Registration,
    decisions: DecisionLog,
    introductions: Introductions,
    refusal_of: Callable[[ReplicaEntry], Awaitable[str | None]],
    read: ReadBody,
) -> list[AdminRoute]:
    """Return them. `refusal_of` says why what is at a URL can be no replica; `read` keeps bodies within limits."""

    def reports() -> ReplicaReports:
        return ReplicaReports([_report(replica, pool, introductions) for replica in pool])

    async def show_replicas(request: web.Request) -> web.StreamResponse:
        return _json(reports())

    async def register(request: web.Request) -> web.StreamResponse:
        try:
            entry = msgspec.json.decode(await read(request), type=ReplicaEntry)
            if entry.key_file is not None:
                raise RequestError("key_file belongs into the gateway's own file; leave it out", param="key_file")
            check_entry(entry)
        except ConfigError as error:
            raise RequestError(f"this registers no replica: {error}", param=error.option) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(f"this registers no replica: {error}") from None
        if pool.find(entry.url) is None and (refusal := await refusal_of(entry)) is not None:
            raise RequestError(f"{entry.url} is not registered: {refusal}", param="url")
        registration.register(entry)
        return _json(Lease(registration.lease_seconds))

    async def leave(request: web.Request) -> web.StreamResponse:
        if not registration.leave(request.query.get("url", "")):
            raise RequestError("no replica of this URL has registered; give it as ?url=http://…", param="url")
        return _json(reports())

    async def show_decisions(request: web.Request) -> web.StreamResponse:
        limit = request.query.get("limit", str(_DEFAULT_DECISIONS))
        if not limit.isascii() or not limit.isdigit():
            raise RequestError("limit must be a whole number", param="limit")
        return _json(Decisions(decisions.newest(int(limit[:6]))))

    return [
        AdminRoute("GET", "/admin/replicas", show_replicas),
        AdminRoute("POST", "/admin/replicas", register),
        AdminRoute("DELETE", "/admin/replicas", leave, query=("url",)),
        AdminRoute("GET", "/admin/decisions", show_decisions, query=("limit",)),
    ]


def autoscaler_routes(autoscalers: Sequence[Autoscaler], clock: Callable[[], float]) -> list[AdminRoute]:
    """Return the routes that tell what autoscalers decide."""

    async def show_all(request: web.Request) -> web.StreamResponse:
        return _json(report_all(autoscalers, clock()))

    async def show_one(request: web.Request) -> web.StreamResponse:
        model = request.match_info["model"]
        found = next((item for item in autoscalers if item.model == model), None)
        if found is None:
            raise UnknownModel(model, [item.model for item in autoscalers])
        return _json(report(found, clock()))

    return [
        AdminRoute("GET", "/admin/autoscaler", show_all),
        AdminRoute("GET", "/admin/autoscaler/{model:.+}", show_one),
    ]


def _report(replica: Replica, pool: ReplicaPool, introductions: Introductions) -> ReplicaReport:
    wait = replica.breaker.seconds_until_try
    return ReplicaReport(
        url=replica.url,
        kind=replica.adapter.kind,
        version=replica.version,
        models=[model.name for model in replica.models],
        standing=replica.breaker.standing.value,
        reason=replica.breaker.reason,
        # While too few others are up it is asked with every probe.
        next_try_seconds=min(wait, pool.health.probe_seconds) if wait and pool.is_needed(replica) else wait,
        store=introductions.store_of(replica),
        counted_by=introductions.counter(replica),
        in_flight=replica.num_in_flight,
        running=replica.load.num_running,
        waiting=replica.load.num_waiting,
        kv_utilization=replica.load.kv_utilization,
        full=replica.is_full,
        standby=replica.is_standby,
        ejections=replica.breaker.num_ejections,
    )


def _json(document: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), headers={"content-type": "application/json"})
