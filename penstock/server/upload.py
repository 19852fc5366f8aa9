"""Reading an uploaded file from a multipart form while it arrives, within limits of size and number of fields.

Holds one chunk of the file at a time. Knows nothing of what the file is for.
"""

from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from penstock.errors import BodyTooLarge, NotPermitted, RequestError, WrongMediaType
from penstock.protocol.media_type import check_encoding

_FILE = "file"
_MAX_FIELDS = 8
_MAX_FIELD_BYTES = 4096
_MAX_BOUNDARY_BYTES = 70  # as RFC 2046 says; the parser fails over much longer ones
# Around the file: boundaries, headers and the other fields.
_FORM_BYTES = 64 * 1024


class Upload:
    """One form. Read `chunks` to the end; then `fields` holds all other fields."""

    def __init__(self, request: Request, *, known: tuple[str, ...], max_bytes: int, chunk_bytes: int) -> None:
        """`known` are the fields beside the file. Raises RequestError where there is no form that may be read."""
        self.filename: str | None = None  # known before the first chunk
        self.fields: dict[str, str] = {}
        self._request = request
        self._known = known
        self._max_bytes = max_bytes
        self._chunk_bytes = chunk_bytes
        boundary = _boundary(request)
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > max_bytes + _FORM_BYTES:
            raise BodyTooLarge(max_bytes, int(declared))
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._take_header_name,
                "on_header_value": self._take_header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_content,
                "on_part_data": self._take_content,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )
        self._has_ended = False
        self._num_parts = 0
        self._header_name, self._header_value = b"", b""
        self._name = ""  # of the field whose content comes
        self._content = bytearray()  # of the file, as far as it was not given out
        self._field = bytearray()  # of another field
        self._has_file = self._is_file = False

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the file's content. Raises RequestError where the form is not whole or breaks a limit."""
        received = num_file_bytes = 0
        async for piece in self._request.stream():
            received += len(piece)
            if received > self._max_bytes + _FORM_BYTES:
                raise BodyTooLarge(self._max_bytes)
            self._parse(piece)
            while len(self._content) >= self._chunk_bytes:
                chunk = self._take_chunk()
                num_file_bytes += len(chunk)
                yield chunk
        if not self._has_ended:
            raise RequestError("the form is not whole; it must end with its boundary")
        if not self._has_file:
            raise RequestError("file is required: a part of the form with a file name", param=_FILE)
        if num_file_bytes + len(self._content) > self._max_bytes:
            raise BodyTooLarge(self._max_bytes)
        while self._content:
            yield self._take_chunk()

    def _take_chunk(self) -> bytes:
        chunk = bytes(self._content[: self._chunk_bytes])
        del self._content[: self._chunk_bytes]
        return chunk

    def _parse(self, piece: bytes) -> None:
        try:
            self._parser.write(piece)
        except (FormParserError, UnicodeDecodeError):
            raise RequestError("the form cannot be read; send multipart/form-data as RFC 7578 says") from None

    # ------------------------------------------------------------ what the parser finds

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_FIELDS:
            raise RequestError(f"the form has more than {_MAX_FIELDS} fields; leave some out")
        self._name = ""

    def _take_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _take_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            _, options = parse_options_header(self._header_value)
            self._name = options.get(b"name", b"").decode()
            self._is_file = self._name == _FILE and b"filename" in options
            if self._is_file:
                if self._has_file:
                    raise RequestError("the form has two files; send one", param=_FILE)
                self._has_file, self.filename = True, options[b"filename"].decode("utf-8", "replace")
        self._header_name = self._header_value = b""

    def _begin_content(self) -> None:
        self._field = bytearray()
        shown = self._name[:100]
        if self._name not in (_FILE, *self._known):
            fields = ", ".join((_FILE, *self._known))
            raise RequestError(f"unknown parameter {shown!r}; the form may have: {fields}", param=shown)
        if self._name in self.fields:
            raise RequestError(f"{shown} stands twice in the form; give it once", param=shown)

    def _take_content(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._content += data[start:end]
            return
        self._field += data[start:end]
        if len(self._field) > _MAX_FIELD_BYTES:
            raise RequestError(f"{self._name}: at most {_MAX_FIELD_BYTES} bytes", param=self._name)

    def _end_part(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._field.decode("utf-8", "replace")
        self._is_file = False

    def _end(self) -> None:
        self._has_ended = True


def _boundary(request: Request) -> bytes:
    media_type, options = parse_options_header(request.headers.get("content-type", ""))
    if media_type != b"multipart/form-data":
        raise WrongMediaType("send the file as a form, with the header 'Content-Type: multipart/form-data'")
    check_encoding(request.headers)
    # Any web page may send a form to any server that its reader can reach; browsers then say where it came from.
    origin = request.headers.get("origin")
    if origin is not None and _place(origin) != request.headers.get("host"):
        raise NotPermitted("files are not taken from pages of other sites")
    boundary = options.get(b"boundary")
    if not boundary:
        raise RequestError("the form cannot be read: its Content-Type names no boundary")
    if len(boundary) > _MAX_BOUNDARY_BYTES:
        raise RequestError(f"the form's boundary has {len(boundary)} characters; give at most {_MAX_BOUNDARY_BYTES}")
    return boundary


def _place(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""
