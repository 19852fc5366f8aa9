"""The handler of a route that generates: body in, an answer begun, delivered.

Knows nothing of how a route's request becomes an answer.
"""

from functools import partial
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from penstock.protocol.frames import FRAMES_HEADER
from penstock.protocol.generation import GenerationRequest
from penstock.server.answer import Answer
from penstock.server.body import read_request
from penstock.server.context import ServerContext
from penstock.server.endpoint import Handler, caller_of, record_of
from penstock.server.generation import check_limits
from penstock.server.streaming import AnswerResponse, Reply
from penstock.telemetry import RequestRecord
from penstock.tenants import Caller

Wanted = TypeVar("Wanted", bound=GenerationRequest)
Taken_contra = TypeVar("Taken_contra", bound=GenerationRequest, contravariant=True)


class Begin(Protocol[Taken_contra]):
    async def __call__(
        self,
        context: ServerContext,
        caller: Caller,
        record: RequestRecord,
        wanted: Taken_contra,
        /,
        *,
        frames: str | None,
    ) -> tuple[Answer, Reply, bool]:
        """Check a request and start its answer, which the caller must deliver or abort. Raises PenstockError.

        Also returns whether it goes in frames, which `frames`, a header, asks for.
        """


def answer_handler(context: ServerContext, takes: type[Wanted], begin: Begin[Wanted]) -> Handler:
    """Return what answers requests of a kind."""

    async def create(request: Request) -> Response:
        record, caller = record_of(request), caller_of(request)
        wanted = await read_request(
            request,
            takes,
            context.config.max_body_bytes,
            context.texts,
            partial(check_limits, context, caller),
            max_entries=context.max_entries,
        )
        frames = request.headers.get(FRAMES_HEADER)
        answer, reply, is_framed = await begin(context, caller, record, wanted, frames=frames)
        return AnswerResponse(
            answer,
            reply,
            stream=wanted.wants_stream,
            record=record,
            answers=context.answers,
            standstill=context.standstill,
            framed=is_framed,
        )

    return create
