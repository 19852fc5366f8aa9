"""Files and batches through the gateway: any Penstock replica can answer, for all of them share one store.

Bodies are passed on as they come, in both directions. Which model a batch is for stands in its file; where one replica
does not serve it, a replica of another model is asked. Knows nothing of policies: nobody waits for a token here.
"""

import asyncio
import functools
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, MultiDict

from penstock.errors import EngineFailed, EngineUnavailable, RouteNotFound, UnknownModel
from penstock.fleet.replica import Replica, ReplicaPool
from penstock.fleet.router.connection import BodyClock, Connections, read_body
from penstock.fleet.router.downstream import ClientGone, begin_stream
from penstock.fleet.router.upstream import (
    RETRIED_STATUSES,
    UPSTREAM_ERRORS,
    error_code,
    note_failure,
    read_beginning,
    read_error,
    refusal_reply,
    request_headers,
    response_headers,
    target,
)
from penstock.protocol.media_type import check_encoding

PATTERN = r"/v1/{kind:files|batches}{rest:(?:/[A-Za-z0-9_-]+){0,2}}"


class FileProxy:
    def __init__(self, session: aiohttp.ClientSession, pool: ReplicaPool, connections: Connections) -> None:
        self._session = session
        self._pool = pool
        self._connections = connections

    async def forward(
        self, request: web.Request, request_id: str, *, max_body_bytes: int, has_keys: bool
    ) -> web.StreamResponse:
        """Answer a request with what a replica answers. Raises PenstockError where none does, and ClientGone."""
        check_encoding(request.headers)
        is_upload = request.method == "POST" and request.match_info["kind"] == "files"
        if is_upload:
            body: bytes | _Upload = _Upload(request, self._connections)
        else:
            body = await read_body(request, max_body_bytes, self._connections)
        refusal: web.Response | None = None
        for replica in self._candidates():
            headers = request_headers(request.headers, replica, request_id, has_keys=has_keys)
            if is_upload and request.content_length is not None:
                headers["content-length"] = str(request.content_length)  # or the replica could refuse it only late
            try:
                async with await self._ask(request, replica, headers, body) as upstream:
                    if not _may_try_elsewhere(request, upstream.status):
                        return await self._pass_on(request, request_id, replica, upstream)
                    refusal, code = await self._refusal(request_id, upstream)
                    if upstream.status == 404 and code != UnknownModel.code:
                        return refusal
            except UPSTREAM_ERRORS as error:
                if isinstance(body, _Upload) and body.has_failed:
                    raise ClientGone from None
                note_failure(replica, error)
                was_sent = not isinstance(error, aiohttp.ClientConnectorError)
                if was_sent and request.method != "GET":
                    # It may have been done: to do it again would be worse than to say so.
                    raise EngineFailed("a replica failed while it worked on this; look whether it was done") from None
        if refusal is not None:
            return refusal
        raise EngineUnavailable("no replica that keeps files is ready; try again in a few seconds")

    def _candidates(self) -> list[Replica]:
        """Return a replica of each model, then the others; the least busy first."""
        # One that does not share the gateway's store would keep them where no other finds them, and count elsewhere.
        keepers = [replica for replica in self._pool if replica.adapter.keeps_files and not replica.is_counted_here]
        if not keepers and len(self._pool):
            raise RouteNotFound("files and batches need a Penstock replica on the gateway's store; there is none here")
        usable = sorted((item for item in keepers if item.is_usable), key=lambda item: item.busyness)
        first: dict[object, Replica] = {}
        for replica in usable:
            first.setdefault(replica.models, replica)
        return [*first.values(), *(replica for replica in usable if replica not in first.values())]

    async def _ask(
        self, request: web.Request, replica: Replica, headers: MultiDict[str], body: "bytes | _Upload"
    ) -> aiohttp.ClientResponse:
        """Send a request and return the answer when its head has come, which may take as long as silence may last.

        How long the caller takes to send an upload does not count.
        """
        url = target(replica, request.rel_url.raw_path_qs)
        silence_seconds = self._pool.health.silence_seconds
        async with asyncio.timeout(silence_seconds) as patience:
            if isinstance(body, bytes):
                data: bytes | AsyncIterator[bytes] = body
            else:
                data, body.patience = body.pieces(silence_seconds), patience
            try:
                return await self._session.request(
                    request.method, url, data=data, headers=headers, allow_redirects=False
                )
            finally:
                if isinstance(body, _Upload):
                    body.patience = None  # the rest may come later than the answer

    async def _pass_on(
        self, request: web.Request, request_id: str, replica: Replica, upstream: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        """Pass an answer on as it comes: its replica has some seconds for it, and more for what has come."""
        headers = response_headers(upstream.headers)
        headers["x-request-id"] = request_id
        if upstream.content_length is not None:
            headers["content-length"] = str(upstream.content_length)
        response = web.StreamResponse(status=upstream.status, headers=headers)
        downstream = await begin_stream(request, response)
        limits, clock = self._connections.limits, asyncio.get_running_loop().time
        seconds_left = limits.body_seconds
        try:
            while True:
                began = clock()
                async with asyncio.timeout(seconds_left):
                    data = await upstream.content.readany()
                if not data:
                    break
                seconds_left += len(data) / limits.body_bytes_per_second - (clock() - began)
                await downstream.write(data)
        except UPSTREAM_ERRORS as error:
            if not downstream.was_slow:
                note_failure(replica, error)
            downstream.cut()  # the caller must not take a part for the whole
            return response
        await downstream.end()
        return response

    async def _refusal(self, request_id: str, upstream: aiohttp.ClientResponse) -> tuple[web.Response, str]:
        async with asyncio.timeout(self._connections.limits.body_seconds):
            body = await read_error(functools.partial(read_beginning, upstream))
        code = error_code(body)
        reply = refusal_reply(upstream.status, code, body, response_headers(upstream.headers))
        headers = CIMultiDict(reply.headers)
        headers["x-request-id"] = request_id
        return web.Response(status=reply.status, body=reply.body, headers=headers), code


def _may_try_elsewhere(request: web.Request, status: int) -> bool:
    """Whether a status may be another on another replica, and asking there does no harm."""
    if request.method == "GET":
        return status in RETRIED_STATUSES
    return request.method == "POST" and request.match_info["kind"] == "batches" and status == 404


class _Upload:
    """A body that is passed on as it comes, and knows whether it was its caller who failed."""

    def __init__(self, request: web.Request, connections: Connections) -> None:
        self._request = request
        self._clock = BodyClock(request, connections)
        self.patience: asyncio.Timeout | None = None  # with the replica: it stands still while the caller is awaited
        self.has_failed = False  # it came too slowly, broke off or was no body

    async def pieces(self, silence_seconds: float) -> AsyncIterator[bytes]:
        while True:
            self._allow(None)
            data = await self._next()
            self._allow(asyncio.get_running_loop().time() + silence_seconds)
            if not data:
                return
            yield data

    def _allow(self, until: float | None) -> None:
        if self.patience is not None and not self.patience.expired():
            self.patience.reschedule(until)

    async def _next(self) -> bytes:
        try:
            return await self._clock.next()
        except TimeoutError:
            self.has_failed = True
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError from None
        except Exception:
            self.has_failed = True
            raise
