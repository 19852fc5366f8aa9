"""The admin routes of rollouts: what is rolled out and how it stands, begin one, end one."""

import msgspec
from aiohttp import web

from penstock.errors import RequestError
from penstock.fleet.rollout.course import Rollout
from penstock.fleet.rollout.evidence import Evidence
from penstock.fleet.rollout.report import write_report
from penstock.fleet.rollout.rollouts import Rollouts
from penstock.fleet.router.admin_route import AdminRoute, ReadBody


class WantedRollout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rollout begins with."""

    model: str
    candidate: str


class RolloutReport(msgspec.Struct, frozen=True):
    """A rollout, and what its step has shown so far."""

    rollout: Rollout
    evidence: Evidence | None


class RolloutReports(msgspec.Struct, frozen=True):
    rollouts: list[RolloutReport]


def rollout_routes(rollouts: Rollouts, read: ReadBody) -> list[AdminRoute]:
    """Return them. `read` keeps bodies within limits."""
    split, controller = rollouts.split, rollouts.controller

    async def reports() -> list[RolloutReport]:
        await controller.look()
        return [
            RolloutReport(rollout, await controller.evidence_of(rollout) if rollout.is_running else None)
            for rollout in split.rollouts
        ]

    async def show(request: web.Request) -> web.StreamResponse:
        return _json(RolloutReports(await reports()))

    async def show_text(request: web.Request) -> web.StreamResponse:
        pages = [write_report(report.rollout, report.evidence) for report in await reports()]
        return web.Response(text="\n".join(pages) or "No rollout.\n", content_type="text/markdown")

    async def begin(request: web.Request) -> web.StreamResponse:
        try:
            wanted = msgspec.json.decode(await read(request), type=WantedRollout)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(f"this begins no rollout: {error}") from None
        return _json(await controller.start(wanted.model, wanted.candidate))

    async def end(request: web.Request) -> web.StreamResponse:
        return _json(await controller.abort(request.query.get("model", "")))

    return [
        AdminRoute("GET", "/admin/rollout", show),
        AdminRoute("GET", "/admin/rollout.md", show_text),
        AdminRoute("POST", "/admin/rollout", begin),
        AdminRoute("DELETE", "/admin/rollout", end, query=("model",)),
    ]


def _json(document: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), headers={"content-type": "application/json"})
