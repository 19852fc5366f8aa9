"""/admin/usage: what each tenant used of each model on each day."""

import asyncio
import datetime

from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import InvalidParameter, RequestError
from penstock.protocol.admin import UsageList
from penstock.server.context import ServerContext
from penstock.server.endpoint import Access, Endpoint
from penstock.server.json_response import json_response
from penstock.store.ledger import UsageLedger


def endpoints(context: ServerContext) -> list[Endpoint]:
    async def show(request: Request) -> Response:
        if context.tenancy.database is None:
            raise RequestError("this server keeps no usage; start it without --store none")
        since = request.query_params.get("since")
        if since is not None:
            _check_day(since)
        ledger = UsageLedger(context.tenancy.database)
        found = await asyncio.to_thread(ledger.read, tenant=request.query_params.get("tenant"), since=since)
        return json_response(UsageList(found))

    return [
        Endpoint(
            method="GET",
            path="/admin/usage",
            handler=show,
            access=Access.ADMIN,
            summary="Usage by tenant, model and UTC day; ?tenant=NAME&since=YYYY-MM-DD",
            tag="Usage",
            query=("tenant", "since"),
            gives=UsageList,
        )
    ]


def _check_day(text: str) -> None:
    try:
        is_day = datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        is_day = False
    if not is_day:
        raise InvalidParameter("since", text, "give a day as YYYY-MM-DD")
