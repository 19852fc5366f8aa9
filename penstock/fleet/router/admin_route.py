"""One route for operators. Knows nothing of who may call it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from penstock.protocol.query import check_query

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ReadBody = Callable[[web.Request], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class AdminRoute:
    method: str
    path: str
    handler: Handler
    query: tuple[str, ...] = ()  # its query's parameters, and no others

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request whose query has nothing that would go unheeded. Raises RequestError."""
        check_query([name for name, _ in request.query.items()], self.query)
        return await self.handler(request)
