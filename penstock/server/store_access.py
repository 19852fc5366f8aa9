"""What the routes of files and batches share: the store, asked in a thread, and pages of lists."""

from starlette.requests import Request

from penstock.errors import InvalidParameter, RequestError
from penstock.server.context import ServerContext
from penstock.store.database import Database


def database_of(context: ServerContext) -> Database:
    """Return the store. Raises RequestError where the server has none."""
    if context.tenancy.database is None:
        raise RequestError("this server keeps no files; start it without --store none")
    return context.tenancy.database


def read_limit(request: Request, *, default: int, most: int) -> int:
    """Return how long a page of a list is to be. Raises InvalidParameter."""
    text = request.query_params.get("limit")
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= most):
        raise InvalidParameter("limit", text, f"give a whole number from 1 to {most}")
    return int(text)
