"""Reading an uploaded file from a multipart form, within limits of size and number of fields.

The form is spooled to a temporary file while it arrives, so that memory stays flat. Knows nothing of what the file is
for.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from penstock.errors import BodyTooLarge, NotPermitted, RequestError, WrongMediaType

_MAX_FIELDS = 8
_MAX_FIELD_BYTES = 4096
# Around the file: boundaries, headers and the other fields.
_FORM_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Upload:
    """A file and the fields beside it."""

    file: UploadFile
    fields: dict[str, str]


@asynccontextmanager
async def uploaded(request: Request, max_bytes: int) -> AsyncIterator[Upload]:
    """Give the form's `file`; it is gone afterwards. Raises RequestError."""
    _check_sender(request)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes + _FORM_BYTES:
        raise BodyTooLarge(max_bytes)
    parser = MultiPartParser(
        request.headers,
        _limited(request, max_bytes + _FORM_BYTES),
        max_files=1,
        max_fields=_MAX_FIELDS,
        max_part_size=_MAX_FIELD_BYTES,
    )
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise RequestError(f"the form cannot be read: {error.message}") from None
    except (KeyError, UnicodeDecodeError):
        raise RequestError("the form cannot be read; send multipart/form-data with a boundary") from None
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise RequestError("file is required: a part of the form with a file name", param="file")
        if (file.size or 0) > max_bytes:
            raise BodyTooLarge(max_bytes)
        yield Upload(file, {name: value for name, value in form.items() if isinstance(value, str)})
    finally:
        await form.close()


def _check_sender(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "multipart/form-data":
        raise WrongMediaType("send the file as a form, with the header 'Content-Type: multipart/form-data'")
    # Any web page may send a form to any server that its reader can reach; browsers then say where it came from.
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise NotPermitted("files are not taken from pages of other sites")


async def _limited(request: Request, max_bytes: int) -> AsyncGenerator[bytes, None]:
    received = 0
    async for chunk in request.stream():
        received += len(chunk)
        if received > max_bytes:
            raise BodyTooLarge(max_bytes)
        yield chunk
