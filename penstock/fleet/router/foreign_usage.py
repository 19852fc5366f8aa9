"""What an answer of a foreign server cost: its own word or, where it has none, an estimate that is marked as one.

Reads bodies and streams. Knows nothing of HTTP connections, limits or where usage is written.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.fleet.router.query import RequestHead, read_document
from penstock.store.quotas import Need
from penstock.telemetry import RequestRecord

# What English text has in the tokens of today's models; a server that tells its usage is never estimated.
_CHARACTERS_PER_TOKEN = 4
_ANSWER_TOKENS = 4096  # of an answer that nobody limited, by a model whose context nobody told
_MAX_HELD_BYTES = 1024 * 1024
_ESTIMATE = "estimate"
_MAX_TOKENS = 2**27  # more than any body holds, or any model writes: who tells more has told nothing

# A quote that stands in an answer's text is escaped, so that this is never found inside one.
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
# A chunk with text in it: foreign servers send one for each token, or for few.
_TEXT = re.compile(rb'"(?:content|text)"\s*:\s*"(?!")')
_END = re.compile(rb"\r?\n\r?\n")
_MOST_BEGUN_BYTES = 3  # of an end, when the last of it is yet to come
_DATA = re.compile(rb"^data:", re.MULTILINE)
_DONE = b"[DONE]"


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """OpenAI's names, and those of its newer APIs."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None

    def write_into(self, record: RequestRecord) -> bool:
        """Note the counts; return whether there were any that can be."""
        prompt = self.prompt_tokens if self.prompt_tokens is not None else self.input_tokens
        output = self.completion_tokens if self.completion_tokens is not None else self.output_tokens
        if prompt is None and output is None:
            return False
        prompt, output = prompt or 0, output or 0
        if not (0 <= prompt <= _MAX_TOKENS and 0 <= output <= _MAX_TOKENS):
            return False
        record.prompt_tokens, record.output_tokens = prompt, output
        details = self.prompt_tokens_details
        cached = (details.cached_tokens or 0) if details is not None else 0
        record.cached_tokens = min(max(0, cached), prompt)
        return True


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    choices: list[Any] | None = None


def need_of(head: RequestHead, max_context_tokens: int | None) -> Need:
    """Return what a request may use, as far as can be told without the model's tokenizer."""
    input_tokens, num_prompts = _input_tokens(head)
    stated = head.most_output_tokens
    room = (max_context_tokens - input_tokens) if max_context_tokens is not None else _ANSWER_TOKENS
    num_answers = min(num_prompts * head.num_choices, _MAX_TOKENS)
    most = stated if stated is not None else max(1, room)
    fewest = head.fewest_output_tokens(most)
    if stated is None and max_context_tokens is None and fewest == most:
        fewest = 0  # where nobody told how long the context is, its end is a guess and nothing certain
    least_output_tokens = num_answers * max(fewest, int(num_answers > 1))
    return Need(
        input_tokens=input_tokens,
        most_output_tokens=min(num_answers * most, _MAX_TOKENS),
        output_is_stated=stated is not None or fewest == most,
        least_output_tokens=min(least_output_tokens, _MAX_TOKENS),
        num_answers=num_answers,
    )


def asking_for_usage(body: bytes) -> bytes:
    """Return a stream's request with the wish that its last chunk tell what it cost."""
    document = read_document(body)
    options = document.get("stream_options")
    options = dict(options) if isinstance(options, Mapping) else {}
    return msgspec.json.encode({**document, "stream_options": {**options, "include_usage": True}})


def read_whole(body: bytes, record: RequestRecord) -> None:
    """Note what an answer that was not streamed cost. The record has the estimate of its prompt."""
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        answer = _Answer()
    if answer.usage is not None and answer.usage.write_into(record):
        return
    record.output_tokens = sum(_tokens_in(choice) for choice in answer.choices or ())
    record.usage_source = _ESTIMATE


class UsageReader:
    """Follows a stream for what it cost. Passes everything on but the chunk of usage that nobody asked for."""

    def __init__(self, record: RequestRecord, *, hides_usage: bool) -> None:
        self._record = record
        self._hides_usage = hides_usage
        self._rest = b""
        self._end = b""
        self._is_too_large = False  # the event that has begun: it passes as it comes
        self._num_texts = 0
        self._is_told = False

    def feed(self, data: bytes) -> bytes:
        """Take bytes in and return those that the caller may have now; [DONE] waits for `last_bytes`."""
        if self._end:
            if len(self._end) <= _MAX_HELD_BYTES:  # nobody waits for what comes behind the end
                self._end += data
            return b""
        if not self._rest and data.endswith(b"\n\n") and _DONE not in data and not _USAGE.search(data):
            self._num_texts += len(_TEXT.findall(data))
            return data
        data = self._rest + data
        passed: list[bytes] = []
        start = 0
        for end in _END.finditer(data):
            event, start = data[start : end.end()], end.end()
            if self._is_too_large:
                self._is_too_large = False
                passed.append(event)
                continue
            if _DONE in event and event.removeprefix(b"data:").strip() == _DONE:
                self._rest, self._end = b"", event + data[start:]
                return b"".join(passed)
            if self._take(event):
                passed.append(event)
        self._rest = data[start:]
        if self._is_too_large or len(self._rest) > _MAX_HELD_BYTES:
            self._is_too_large = True
            passed.append(self._rest[:-_MOST_BEGUN_BYTES])
            self._rest = self._rest[-_MOST_BEGUN_BYTES:]
        return b"".join(passed)

    def last_bytes(self) -> bytes:
        """Return what was held back: the end of the stream, for when its cost is written."""
        held, self._rest, self._end = self._rest + self._end, b"", b""
        return held

    def note_cost(self) -> None:
        """Write into the record what the stream cost so far."""
        if not self._is_told:
            self._record.output_tokens = self._num_texts
            self._record.usage_source = _ESTIMATE

    def _take(self, event: bytes) -> bool:
        """Read one event; return whether the caller gets it."""
        self._num_texts += len(_TEXT.findall(event))
        data = _DATA.search(event)
        if data is None or not _USAGE.search(event):
            return True
        try:
            answer = msgspec.json.decode(event[data.end() :], type=_Answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return True
        self._is_told = (answer.usage is not None and answer.usage.write_into(self._record)) or self._is_told
        return bool(answer.choices) or not self._hides_usage


def _input_tokens(head: RequestHead) -> tuple[int, int]:
    """Return the tokens of all prompts, where texts are estimated, and the number of prompts."""
    prompt = head.prompt
    if not isinstance(prompt, list) or not prompt:
        text = prompt if isinstance(prompt, str) else head.messages if head.messages is not None else head.input
        return _text_tokens(text), 1
    if isinstance(prompt[0], int):
        return len(prompt), 1
    return sum(len(item) if isinstance(item, list) else _text_tokens(item) for item in prompt), len(prompt)


def _text_tokens(value: Any) -> int:
    return max(1, math.ceil(_num_characters(value) / _CHARACTERS_PER_TOKEN))


def _num_characters(value: Any) -> int:
    """Return how much text there is in what a caller sent. Images and the like are URLs, and not text."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return sum(_num_characters(item) for item in value)
    if isinstance(value, Mapping):
        return sum(_num_characters(value.get(name)) for name in ("content", "text"))
    return 0


def _tokens_in(choice: Any) -> int:
    if not isinstance(choice, Mapping):
        return 0
    text = choice.get("text") if "text" in choice else choice.get("message")
    return _text_tokens(text) if _num_characters(text) else 0
