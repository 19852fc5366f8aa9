"""A process that renders one chat template, and can be killed.

Templates come with models and are programs: a few bytes of Jinja loop for ever or fill the memory inside a single
C call, which no thread, sandbox rule or trace function can interrupt. So they run here: sandboxed, under the kernel's
limits on memory, files and processes, behind a parent that kills the process when time is up.

Answers each frame on its standard input with one on its standard output; the first frame is the template. Knows
nothing of the server; imports little, to start fast.
"""

import contextlib
import datetime
import json
import resource
import signal
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from penstock.server.template_frames import HEAD_BYTES, decode_document, encode_frame, length_in
from penstock.stop_signals import leave_to_owner

MAX_MEMORY_BYTES = 1024**3


class GenerationBlocks(jinja2.ext.Extension):
    """Renders what is within {% generation %} and {% endgeneration %}: marks for training, of no meaning here."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateRenderer:
    """One compiled template with the helpers that templates of the Hugging Face kind expect."""

    def __init__(self, template: str, variables: dict[str, Any], max_characters: int) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(template)
        self._variables = variables
        self._max_characters = max_characters

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Return the prompt's text. Raises jinja2.TemplateError."""
        pieces: list[str] = []
        room = self._max_characters
        for piece in self._template.generate(**self._variables, messages=messages, add_generation_prompt=True):
            room -= len(piece)
            if room < 0:
                raise jinja2.TemplateError(f"the rendered prompt is longer than {self._max_characters} characters")
            pieces.append(piece)
        return "".join(pieces)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: unlike Jinja's own filter, without escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format_text: str) -> str:
    return datetime.datetime.now().strftime(format_text)


def _read_frame(stream: BinaryIO) -> dict[str, Any] | None:
    """Return the next document, None at the end of the stream."""
    head = stream.read(HEAD_BYTES)
    return decode_document(stream.read(length_in(head))) if len(head) == HEAD_BYTES else None


def _write_frame(stream: BinaryIO, document: dict[str, Any]) -> None:
    try:
        frame = encode_frame(document)
    except UnicodeEncodeError:
        frame = encode_frame({"error": "it wrote half of a surrogate pair, which is no character"})
    stream.write(frame)
    stream.flush()


def _limit_resources() -> None:
    limits = {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 16}
    if sys.platform != "darwin":  # which has no such limit
        limits[resource.RLIMIT_AS] = MAX_MEMORY_BYTES
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (value, value))


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Have the kernel end this process if the block takes longer, even within one call and without a parent."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(renderer: TemplateRenderer, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"text": renderer.render(request["messages"])}
    except jinja2.TemplateError as error:
        return {"error": str(error)[:500]}
    except (MemoryError, RecursionError) as error:
        return {"error": _exhaustion(error)}
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}  # a mistake in the template's own expressions


def _exhaustion(error: MemoryError | RecursionError) -> str:
    return "it needed more memory than it may have" if isinstance(error, MemoryError) else "it is nested too deeply"


def main() -> None:
    leave_to_owner()
    _limit_resources()
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    setup = _read_frame(requests)
    if setup is None:
        return
    seconds: float = setup["seconds"]
    try:
        with _time_limit(seconds):  # constants are computed when a template is compiled
            renderer = TemplateRenderer(setup["template"], setup["variables"], setup["max_characters"])
    except (jinja2.TemplateError, RecursionError, MemoryError) as error:
        reason = f"it is not valid: {error}" if isinstance(error, jinja2.TemplateError) else _exhaustion(error)
        _write_frame(answers, {"error": reason[:500]})
        return
    _write_frame(answers, {"text": ""})
    while (request := _read_frame(requests)) is not None:
        with _time_limit(seconds):
            answer = _answer(renderer, request)
        _write_frame(answers, answer)


if __name__ == "__main__":
    main()
