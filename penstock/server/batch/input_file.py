"""From the bytes of an input file to lines that can be run, or to what is wrong with them.

Checks what makes a line a line of its batch; its body is checked when its turn comes, as any request's. Knows nothing
of the store.
"""

import codecs
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import msgspec

from penstock.errors import InvalidParameter
from penstock.protocol.openai_batches import MAX_CUSTOM_ID_CHARACTERS, MAX_LINES, BodyModel, InputLine
from penstock.store.batch_work import NewRow
from penstock.store.batches import InputError

_MAX_ERRORS = 50  # as many as a person would read
# Around a body: the names, the endpoint and the longest custom_id.
_ENVELOPE_BYTES = 8192
_NOT_JSON = ("invalid_json_line", "this line is not JSON in UTF-8; give one object on each line")
_TOO_DEEP = ("invalid_json_line", "this line is nested too deeply; give plainer values")
# What would be right of each field of a line.
_RIGHT: Mapping[str, str] = MappingProxyType(
    {
        "custom_id": f"give a text of 1 to {MAX_CUSTOM_ID_CHARACTERS} characters, none of them a control character",
        "method": 'give "POST"',
        "url": "give the batch's endpoint",
        "body": "give the request, an object",
    }
)


class LineTooLong(Exception):
    """A line that is not read to its end."""


class WrongLine(Exception):
    """A line that cannot be run: a code, a sentence and, where there is one, the field."""


class InputFile:
    """One pass over a file. Read `rows` to the end, then see `errors`: with any, the rows mean nothing."""

    def __init__(self, pieces: Iterable[bytes], endpoint: str, model: str | None, max_body_bytes: int) -> None:
        self.errors: list[InputError] = []
        self._pieces = pieces
        self._endpoint = endpoint
        self._model = model
        self._max_line_bytes = max_body_bytes + _ENVELOPE_BYTES
        self._seen: set[str] = set()

    def rows(self) -> Iterator[NewRow]:
        """Yield the lines that are right. Numbers count from 1, empty lines too, as an editor counts."""
        number = 0
        try:
            for number, text in enumerate(split_lines(self._pieces, self._max_line_bytes), start=1):
                if len(self.errors) >= _MAX_ERRORS:
                    return
                if not text.strip():
                    continue
                if len(self._seen) >= MAX_LINES:
                    self._note(None, "too_many_lines", f"the file has more than {MAX_LINES} requests; split it")
                    return
                try:
                    yield self._check(number, text)
                except WrongLine as wrong:
                    self._note(number, *wrong.args)
        except LineTooLong:
            limit = f"more than {self._max_line_bytes} bytes"
            self._note(number + 1, "line_too_long", f"this line has {limit}; make it shorter")
        if not self._seen and not self.errors:
            self._note(None, "empty_file", "the file has no lines; give one request on each")

    def _check(self, number: int, text: bytes) -> NewRow:
        try:
            line = msgspec.json.decode(text, type=InputLine)
            body = bytes(line.body).decode()  # its texts were passed over
        except msgspec.ValidationError:
            raise _explain(text) from None
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise WrongLine(*_NOT_JSON) from None
        except RecursionError:
            raise WrongLine(*_TOO_DEEP) from None
        if line.url != self._endpoint:
            raise WrongLine("mismatched_url", f"give the batch's endpoint, {self._endpoint}", "url")
        if line.custom_id in self._seen:
            raise WrongLine("duplicate_custom_id", "another line has this custom_id", "custom_id")
        try:
            model = msgspec.json.decode(line.body, type=BodyModel).model
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise WrongLine("invalid_body", "the body must be an object that names its model", "body.model") from None
        if self._model is None:  # none is named as far as the file was looked into when the batch was made
            self._model = model
        if model != self._model:
            raise WrongLine("mismatched_model", "all lines must name the first one's model", "body.model")
        self._seen.add(line.custom_id)
        return NewRow(number, line.custom_id, body)

    def _note(self, line: int | None, code: str, message: str, param: str | None = None) -> None:
        self.errors.append(InputError(code, message, line, param))


def _explain(text: bytes) -> WrongLine:
    """Say which field of a line is wrong, and what would be right."""
    shape = WrongLine("invalid_line", f"give an object with the fields {', '.join(_RIGHT)}")
    try:
        fields = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.ValidationError:
        return shape
    except (msgspec.DecodeError, UnicodeDecodeError):  # behind what is wrong already
        return WrongLine(*_NOT_JSON)
    except RecursionError:
        return WrongLine(*_TOO_DEEP)
    for name in fields:
        if name not in _RIGHT:
            shown = name[:100]
            return WrongLine("invalid_line", f"unknown field {shown!r}; a line has {', '.join(_RIGHT)}", shown)
    for field in msgspec.structs.fields(InputLine):
        if field.name not in fields:
            return WrongLine("invalid_line", f"{field.name} is required; {_RIGHT[field.name]}", field.name)
        try:
            msgspec.convert(fields[field.name], field.type)
        except msgspec.ValidationError:
            wrong = InvalidParameter(field.name, fields[field.name], _RIGHT[field.name])
            return WrongLine("invalid_line", str(wrong), wrong.param)
    return shape


def first_model(pieces: Iterable[bytes], max_body_bytes: int) -> str | None:
    """Return the model that a file's first request names; None where none of its first lines can be read.

    Somebody waits meanwhile: of pieces only so many are read as the longest line may need.
    """
    beginning = bytearray()
    for piece in pieces:
        beginning += piece
        if len(beginning) > max_body_bytes + _ENVELOPE_BYTES:
            break
    for text in beginning.removeprefix(codecs.BOM_UTF8).lstrip().split(b"\n", _MAX_ERRORS)[:_MAX_ERRORS]:
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            line = msgspec.json.decode(text, type=InputLine)
            return msgspec.json.decode(line.body, type=BodyModel).model
    return None


def split_lines(pieces: Iterable[bytes], max_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a text that comes in pieces, without their ends. Raises LineTooLong.

    A byte order mark, which some editors write before a text, is no part of its first line.
    """
    waiting, mark = b"", codecs.BOM_UTF8
    for piece in pieces:
        *whole, waiting = (waiting + piece).split(b"\n")
        for line in whole:
            if len(line) > max_bytes:
                raise LineTooLong
            yield line.removeprefix(mark)
            mark = b""
        if len(waiting) > max_bytes:
            raise LineTooLong
    if last := waiting.removeprefix(mark):
        yield last
