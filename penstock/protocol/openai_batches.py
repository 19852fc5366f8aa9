"""The wire types of /v1/batches, and of the lines of a batch's files.

An input line is read with msgspec: there are many, and all but its body, which is checked as any request's is when its
turn comes, is small.
"""

from typing import Annotated, Literal

import msgspec
from pydantic import Field

from penstock.protocol.labels import Labels
from penstock.protocol.wire import WireModel

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
WINDOW_SECONDS = 24 * 3600.0

MAX_LINES = 50_000
MAX_CUSTOM_ID_CHARACTERS = 512


class BatchRequest(WireModel):
    """A batch to be made from an uploaded file."""

    input_file_id: str = Field(max_length=64, description="A file uploaded with the purpose `batch`")
    endpoint: Endpoint = Field(description="The endpoint of every line")
    completion_window: Literal["24h"] = Field(description="What has not run by then is told as expired")
    metadata: Labels | None = Field(None, description="Kept with the batch, and told with it")


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    total: int
    completed: int
    failed: int


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of an input file."""

    custom_id: Annotated[
        str, msgspec.Meta(min_length=1, max_length=MAX_CUSTOM_ID_CHARACTERS, pattern=r"^[^\x00-\x1f\x7f]*$")
    ]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class BodyModel(msgspec.Struct, frozen=True):
    """What must be known of a body before its turn comes."""

    model: str


class LineResponse(msgspec.Struct, frozen=True, kw_only=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str


class ResultLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of an output or error file."""

    id: str
    custom_id: str
    response: LineResponse | None = None
    error: LineError | None = None
