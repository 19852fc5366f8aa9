"""/v1/batches: files of requests that are answered in idle capacity."""

import asyncio
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import InvalidParameter
from penstock.protocol.openai_batches import (
    WINDOW_SECONDS,
    Batch,
    BatchError,
    BatchErrors,
    BatchList,
    BatchRequest,
    RequestCounts,
)
from penstock.protocol.openai_files import UPLOAD_PURPOSE
from penstock.server.batch.input_file import first_model
from penstock.server.body import read_request
from penstock.server.claim import Claim
from penstock.server.context import ServerContext
from penstock.server.endpoint import Access, Endpoint, caller_of
from penstock.server.json_response import json_response
from penstock.server.store_access import database_of, read_limit
from penstock.store.batches import BatchStore, NewBatch, StoredBatch
from penstock.store.files import FileStore

_PAGE, _MAX_PAGE = 20, 100
_QUERY = ("after", "limit")


def endpoints(context: ServerContext) -> list[Endpoint]:
    async def create(request: Request) -> Response:
        caller, store = caller_of(request), BatchStore(database_of(context))
        wanted = await read_request(request, BatchRequest, context.config.max_body_bytes, context.texts)
        await asyncio.to_thread(store.check_room, caller.tenant)  # before anything is read for nothing
        model = await _model_of(caller.tenant, wanted)
        if model is not None:
            context.check_model(model, caller)
        new = NewBatch(
            endpoint=wanted.endpoint,
            model=model,
            input_file_id=wanted.input_file_id,
            completion_window=wanted.completion_window,
            window_seconds=WINDOW_SECONDS,
            labels=wanted.metadata,
        )
        batch = await asyncio.to_thread(store.create, caller.tenant, new)
        context.new_batch.set()
        return json_response(_shown(batch))

    async def _model_of(tenant: str, wanted: BatchRequest) -> str | None:
        files, max_bytes = FileStore(database_of(context)), context.config.max_body_bytes
        file = await asyncio.to_thread(files.find, tenant, wanted.input_file_id)
        if file.purpose != UPLOAD_PURPOSE:
            raise InvalidParameter("input_file_id", file.id, f"give a file with the purpose {UPLOAD_PURPOSE!r}")
        read = partial(first_model, files.read(file.id), max_bytes)
        return await context.texts.run(Claim(tenant), min(file.num_bytes, max_bytes), read)

    async def list_batches(request: Request) -> Response:
        tenant, store = caller_of(request).tenant, BatchStore(database_of(context))
        limit = read_limit(request, default=_PAGE, most=_MAX_PAGE)
        after = request.query_params.get("after")
        found = await asyncio.to_thread(store.list, tenant, after=after, limit=limit + 1)
        data = [_shown(batch) for batch in found[:limit]]
        ends = (data[0].id, data[-1].id) if data else (None, None)
        return json_response(BatchList(data=data, first_id=ends[0], last_id=ends[1], has_more=len(found) > limit))

    async def retrieve(request: Request) -> Response:
        store = BatchStore(database_of(context))
        found = await asyncio.to_thread(store.find, caller_of(request).tenant, request.path_params["batch_id"])
        return json_response(_shown(found))

    async def cancel(request: Request) -> Response:
        store = BatchStore(database_of(context))
        found = await asyncio.to_thread(store.cancel, caller_of(request).tenant, request.path_params["batch_id"])
        return json_response(_shown(found))

    def route(method: str, path: str, **values: Any) -> Endpoint:
        return Endpoint(
            method=method, path=f"/v1/batches{path}", access=Access.CLIENT, tag="Batches", **{"gives": Batch, **values}
        )

    return [
        route("POST", "", handler=create, summary="Answer the requests of a file", takes=BatchRequest),
        route("GET", "", handler=list_batches, summary="List batches, newest first", query=_QUERY, gives=BatchList),
        route("GET", "/{batch_id}", handler=retrieve, summary="How far a batch is"),
        route("POST", "/{batch_id}/cancel", handler=cancel, summary="Stop a batch; what is finished is kept"),
    ]


def _shown(batch: StoredBatch) -> Batch:
    def moment(status: str) -> int | None:
        at = batch.moments.get(status)
        return None if at is None else int(at)

    errors = [
        BatchError(code=error.code, line=error.line, message=error.message, param=error.param) for error in batch.errors
    ]
    counts = RequestCounts(total=batch.num_rows, completed=batch.num_completed, failed=batch.num_failed)
    return Batch(
        id=batch.id,
        endpoint=batch.endpoint,
        model=batch.model,
        errors=BatchErrors(data=errors) if errors else None,
        input_file_id=batch.input_file_id,
        completion_window=batch.completion_window,
        status=batch.status,
        output_file_id=batch.output_file_id,
        error_file_id=batch.error_file_id,
        created_at=int(batch.created_at),
        expires_at=int(batch.expires_at),
        in_progress_at=moment("in_progress"),
        finalizing_at=moment("finalizing"),
        completed_at=moment("completed"),
        failed_at=moment("failed"),
        expired_at=moment("expired"),
        cancelling_at=moment("cancelling"),
        cancelled_at=moment("cancelled"),
        request_counts=counts,
        metadata=batch.labels,
    )
