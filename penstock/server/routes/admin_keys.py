"""/admin/keys: the keys in the store, made, listed, replaced and taken back."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import RequestError
from penstock.protocol.admin import KeyList, KeyRequest, NewSecret, RevokedKey, RotateRequest
from penstock.server.body import read_request
from penstock.server.context import ServerContext
from penstock.server.endpoint import Access, Endpoint
from penstock.server.json_response import json_response
from penstock.store.keys import KeyStore

Result = TypeVar("Result")

_TAG = "Keys"


def endpoints(context: ServerContext) -> list[Endpoint]:
    max_bytes = context.config.max_body_bytes

    async def on_keys(work: Callable[[KeyStore], Result]) -> Result:
        store = context.tenancy.stored_keys
        if store is None:
            raise RequestError("this server's keys are not in a store; start it without --keys and --store none")
        return await asyncio.get_running_loop().run_in_executor(context.tenancy.key_thread, work, store)

    async def list_keys(request: Request) -> Response:
        return json_response(KeyList(await on_keys(lambda store: store.list())))

    async def create(request: Request) -> Response:
        wanted = await read_request(request, KeyRequest, max_bytes, context.texts)
        terms = wanted.terms()
        secret = await on_keys(lambda store: store.create(wanted.name, terms))
        return json_response(NewSecret(wanted.name, secret))

    async def rotate(request: Request) -> Response:
        wanted = await read_request(request, RotateRequest, max_bytes, context.texts)
        name = request.path_params["name"]
        secret = await on_keys(lambda store: store.rotate(name, overlap_seconds=wanted.overlap_seconds))
        return json_response(NewSecret(name, secret))

    async def revoke(request: Request) -> Response:
        name = request.path_params["name"]
        await on_keys(lambda store: store.revoke(name))
        return json_response(RevokedKey(name))

    return [
        Endpoint(
            method="GET",
            path="/admin/keys",
            handler=list_keys,
            access=Access.ADMIN,
            summary="List the keys, without their secrets",
            tag=_TAG,
            query=(),
            gives=KeyList,
        ),
        Endpoint(
            method="POST",
            path="/admin/keys",
            handler=create,
            access=Access.ADMIN,
            summary="Make a key; its secret is told this once",
            tag=_TAG,
            query=(),
            takes=KeyRequest,
            gives=NewSecret,
        ),
        Endpoint(
            method="POST",
            path="/admin/keys/{name}/rotate",
            handler=rotate,
            access=Access.ADMIN,
            summary="Give a key a new secret",
            tag=_TAG,
            query=(),
            takes=RotateRequest,
            gives=NewSecret,
        ),
        Endpoint(
            method="DELETE",
            path="/admin/keys/{name}",
            handler=revoke,
            access=Access.ADMIN,
            summary="Revoke a key; every server on the store knows within seconds",
            tag=_TAG,
            query=(),
            gives=RevokedKey,
        ),
    ]
