"""Log lines: one JSON object or one readable line each, and the line that sums up a request.

Never sees a prompt or an answer: only identities, counts, seconds and outcomes. Knows nothing of HTTP or the engine.
"""

import datetime
import json
import logging
import operator
import sys
from dataclasses import dataclass, fields
from typing import Any, Literal, TextIO

LogFormat = Literal["json", "text"]

_ACCESS_LOGGER = "penstock.access"
_FIELDS = "penstock_fields"
_GENERATION_FIELDS = ("stream", "num_choices", "prompt_tokens", "cached_tokens", "output_tokens")


@dataclass(slots=True)
class RequestRecord:
    """What is known of one HTTP request. Filled in on its way, written as one line at its end."""

    request_id: str
    method: str
    path: str
    arrival: float  # time.monotonic() when its head was read
    route: str = "unmatched"  # the declared path, not the caller's
    tenant: str = ""
    model: str = ""
    completion_id: str = ""
    stream: bool = False
    num_choices: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    usage_source: str = ""  # "estimate" where a foreign server did not tell these counts
    ttft_seconds: float | None = None
    total_seconds: float = 0.0
    finish: str = ""  # finish reasons of the choices, without repeats
    status: int = 0
    error_code: str = ""


_RECORD_FIELDS = tuple(field.name for field in fields(RequestRecord) if field.name != "arrival")
_PLAIN_FIELDS = tuple(name for name in _RECORD_FIELDS if name not in _GENERATION_FIELDS)  # of what made no answer
_read_record, _read_plain = operator.attrgetter(*_RECORD_FIELDS), operator.attrgetter(*_PLAIN_FIELDS)
_write_json = json.JSONEncoder(ensure_ascii=False, default=str).encode


def configure_logging(log_format: LogFormat, *, process: str, stream: TextIO | None = None) -> None:
    """Send the whole process's log lines to `stream` (standard error), each marked with the process's name."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(_JsonLines(process) if log_format == "json" else _TextLines(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    # No line tells these, and finding them out takes longer than writing one.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    # Its start and stop lines say what ours say; its per-request lines are replaced by `log_request`.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def log_event(logger: logging.Logger, message: str, *, level: int = logging.INFO, **values: Any) -> None:
    """Write one line with named values."""
    if logger.isEnabledFor(level):
        logger.log(level, message, extra={_FIELDS: values})


def log_request(record: RequestRecord) -> None:
    """Write a request's line: what it asked for, what it cost and how it ended."""
    logger = logging.getLogger(_ACCESS_LOGGER)
    if not logger.isEnabledFor(logging.INFO):
        return
    if record.num_choices:
        found = zip(_RECORD_FIELDS, _read_record(record), strict=True)
    else:
        found = zip(_PLAIN_FIELDS, _read_plain(record), strict=True)
    # One for every request: made here, because the logger would look for the line of code that it comes from.
    line = logging.LogRecord(_ACCESS_LOGGER, logging.INFO, "", 0, "request", None, None)
    values = {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in found
        if value is not None and value != ""
    }
    setattr(line, _FIELDS, values)
    logger.handle(line)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.datetime.fromtimestamp(record.created, tz=datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _JsonLines(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(getattr(record, _FIELDS, {}))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return _write_json(line)


class _TextLines(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        values = " ".join(f"{name}={_shown(value)}" for name, value in getattr(record, _FIELDS, {}).items())
        parts = (_time(record), record.levelname.lower(), self._process, _one_line(record.getMessage()), values)
        line = " ".join(part for part in parts if part)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _shown(value: Any) -> str:
    text = str(value)
    plain = bool(text) and text.isprintable() and not any(mark in text for mark in ' "=')
    return text if plain else json.dumps(text)


def _one_line(text: str) -> str:
    """Keep what a caller sent (a path) from starting a line of its own."""
    return text.replace("\r", "\\r").replace("\n", "\\n")
