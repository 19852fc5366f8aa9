"""The wire types of /v1/files."""

from typing import Literal

import msgspec

# What a file may be uploaded for, and what those that Penstock makes are for.
UPLOAD_PURPOSE = "batch"
OUTPUT_PURPOSE = "batch_output"


class File(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True
