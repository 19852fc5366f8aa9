"""/v1/files: what batches read, and what they wrote."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from penstock.errors import InvalidParameter, Overloaded, RequestError
from penstock.protocol.openai_files import UPLOAD_PURPOSE, DeletedFile, File, FileList
from penstock.server.context import ServerContext
from penstock.server.endpoint import Access, Endpoint, caller_of
from penstock.server.json_response import json_response
from penstock.server.store_access import database_of, read_limit
from penstock.server.upload import Upload
from penstock.store.files import CHUNK_BYTES, FileStore, StoredFile

MAX_FILE_BYTES = 200 * 1024 * 1024

_MAX_PAGE = 10_000
_PURPOSE = "purpose"
_QUERY = ("after", "limit", _PURPOSE, "order")
_MAX_UPLOADS = 2  # of one tenant at a time, in one worker: each may spool a whole file
_FORM = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        _PURPOSE: {"type": "string", "enum": [UPLOAD_PURPOSE]},
    },
    "required": ["file", _PURPOSE],
    "additionalProperties": False,
}


def endpoints(context: ServerContext) -> list[Endpoint]:
    num_uploads: Counter[str] = Counter()

    @contextmanager
    def one_of_few(tenant: str) -> Iterator[None]:
        if num_uploads[tenant] >= _MAX_UPLOADS:
            raise Overloaded(
                f"{_MAX_UPLOADS} of your uploads are under way; send one after the other", retry_after_seconds=1
            )
        num_uploads[tenant] += 1
        try:
            yield
        finally:
            num_uploads[tenant] -= 1
            if not num_uploads[tenant]:
                del num_uploads[tenant]

    async def create(request: Request) -> Response:
        tenant, store = caller_of(request).tenant, FileStore(database_of(context))
        upload = Upload(request, known=(_PURPOSE,), max_bytes=MAX_FILE_BYTES, chunk_bytes=CHUNK_BYTES)
        with one_of_few(tenant):
            return json_response(_shown(await _store(store, tenant, upload)))

    async def list_files(request: Request) -> Response:
        tenant, store = caller_of(request).tenant, FileStore(database_of(context))
        limit, query = read_limit(request, default=_MAX_PAGE, most=_MAX_PAGE), request.query_params
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidParameter("order", order, "give asc or desc")
        found = await asyncio.to_thread(
            store.list,
            tenant,
            after=query.get("after"),
            limit=limit + 1,
            purpose=query.get(_PURPOSE),
            newest_first=order == "desc",
        )
        data = [_shown(file) for file in found[:limit]]
        ends = (data[0].id, data[-1].id) if data else (None, None)
        return json_response(FileList(data=data, first_id=ends[0], last_id=ends[1], has_more=len(found) > limit))

    async def retrieve(request: Request) -> Response:
        store = FileStore(database_of(context))
        return json_response(_shown(await _find(store, request)))

    async def content(request: Request) -> Response:
        store = FileStore(database_of(context))
        file = await _find(store, request)
        headers = {"content-length": str(file.num_bytes), "x-content-type-options": "nosniff"}
        return StreamingResponse(_in_thread(store.read(file.id)), headers=headers, media_type="application/jsonl")

    async def delete(request: Request) -> Response:
        store, file_id = FileStore(database_of(context)), request.path_params["file_id"]
        await asyncio.to_thread(store.delete, caller_of(request).tenant, file_id)
        return json_response(DeletedFile(id=file_id))

    def route(method: str, path: str, **values: Any) -> Endpoint:
        return Endpoint(method=method, path=f"/v1/files{path}", access=Access.CLIENT, tag="Batches", **values)

    return [
        route("POST", "", handler=create, summary="Upload a file of requests", form=_FORM, gives=File),
        route("GET", "", handler=list_files, summary="List files", query=_QUERY, gives=FileList),
        route("GET", "/{file_id}", handler=retrieve, summary="Describe a file", gives=File),
        route("GET", "/{file_id}/content", handler=content, summary="Download a file", gives="application/jsonl"),
        route("DELETE", "/{file_id}", handler=delete, summary="Delete a file", gives=DeletedFile),
    ]


async def _find(store: FileStore, request: Request) -> StoredFile:
    return await asyncio.to_thread(store.find, caller_of(request).tenant, request.path_params["file_id"])


async def _store(store: FileStore, tenant: str, upload: Upload) -> StoredFile:
    """Write a file while it arrives; what is not whole or not wanted leaves nothing."""
    file_id = await asyncio.to_thread(store.begin, tenant, "", UPLOAD_PURPOSE)
    num_bytes = number = 0
    try:
        async for data in upload.chunks():
            await asyncio.to_thread(store.append, file_id, number, data)
            num_bytes += len(data)
            number += 1
        purpose = upload.fields.get(_PURPOSE)
        if purpose != UPLOAD_PURPOSE:
            raise InvalidParameter(_PURPOSE, purpose, f"give {UPLOAD_PURPOSE!r}")
        if not num_bytes:
            raise RequestError("the file is empty; give one request on each line", param="file")
        return await asyncio.to_thread(store.finish, tenant, file_id, _clean(upload.filename), num_bytes)
    except BaseException:
        await asyncio.to_thread(store.give_up, file_id)
        raise


def _clean(name: str | None) -> str:
    kept = "".join(character for character in name or "" if character.isprintable())
    return kept.encode("utf-8", "ignore").decode()[-255:] or "upload.jsonl"


def _shown(file: StoredFile) -> File:
    return File(
        id=file.id,
        bytes=file.num_bytes,
        created_at=int(file.created_at),
        filename=file.filename,
        purpose=file.purpose,
    )


async def _in_thread(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece
