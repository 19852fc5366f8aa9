"""The pages a browser opens: / to see the server's state and try it, /docs to read what it offers."""

from starlette.requests import Request
from starlette.responses import Response

from penstock.server.context import ServerContext
from penstock.server.endpoint import Access, Endpoint
from penstock.server.pages import StaticPage


def endpoints(context: ServerContext) -> list[Endpoint]:
    return [
        _page("/", StaticPage.load("home.html"), "A page to see the server's state and to try it"),
        _page("/docs", StaticPage.load("docs.html"), "This API, for people"),
    ]


def _page(path: str, page: StaticPage, summary: str) -> Endpoint:
    async def show(request: Request) -> Response:
        return Response(page.body, headers=dict(page.headers))

    return Endpoint(
        method="GET",
        path=path,
        handler=show,
        access=Access.PUBLIC,
        summary=summary,
        tag="Pages",
        gives="text/html",
        in_document=False,
    )
