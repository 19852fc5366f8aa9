"""What an answer of a foreign server cost: its own word or, where it has none, an estimate that is marked as one.

Reads bodies and streams. Knows nothing of HTTP connections, limits or where usage is written.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

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

T = TypeVar("T")


class _Usage(NamedTuple):
    """What a server tells of a cost; None: nothing of that."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int = 0  # of the prompt

    def write_into(self, record: RequestRecord) -> None:
        """Note what is told; the rest of the record stays as it is."""
        if self.prompt_tokens is not None:
            record.prompt_tokens = self.prompt_tokens
            record.cached_tokens = min(self.cached_tokens, self.prompt_tokens)
        if self.output_tokens is not None:
            record.output_tokens = self.output_tokens


class _Answer(msgspec.Struct):
    # Read each by itself: one that is odd does not hide the other.
    usage: msgspec.Raw = msgspec.Raw(b"null")
    choices: msgspec.Raw = msgspec.Raw(b"null")


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
    answer = _decoded(body, _Answer) or _Answer()
    usage, choices = _read_usage(answer.usage), _read_choices(answer.choices)
    usage.write_into(record)
    if usage.output_tokens is None:
        record.output_tokens = sum(_tokens_in(choice) for choice in choices)
    # Answers without choices, such as embeddings, have no output to tell of.
    if usage.prompt_tokens is None or (usage.output_tokens is None and choices):
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
        self._has_prompt_tokens = False  # the stream has told them
        self._has_output_tokens = False

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
        if not self._has_output_tokens:
            self._record.output_tokens = self._num_texts
        if not (self._has_prompt_tokens and self._has_output_tokens):
            self._record.usage_source = _ESTIMATE

    def _take(self, event: bytes) -> bool:
        """Read one event; return whether the caller gets it."""
        self._num_texts += len(_TEXT.findall(event))
        data = _DATA.search(event)
        if data is None or not _USAGE.search(event):
            return True
        answer = _decoded(event[data.end() :], _Answer)
        if answer is None:
            return True
        usage = _read_usage(answer.usage)
        usage.write_into(self._record)
        self._has_prompt_tokens = self._has_prompt_tokens or usage.prompt_tokens is not None
        self._has_output_tokens = self._has_output_tokens or usage.output_tokens is not None
        return bool(_read_choices(answer.choices)) or not self._hides_usage


def _decoded(data: bytes | msgspec.Raw, kind: type[T]) -> T | None:
    """Return what stands there; None where that cannot be read."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _read_usage(data: msgspec.Raw) -> _Usage:
    """Return what is told, by OpenAI's names and those of its newer APIs. Counts that cannot be have told nothing."""
    told = _decoded(data, dict) or {}
    counts: list[int | None] = []
    for names in (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens")):
        value = next((told[name] for name in names if told.get(name) is not None), None)
        count = _whole_number(value)
        if value is not None and (count is None or not 0 <= count <= _MAX_TOKENS):
            return _Usage()
        counts.append(count)
    details = told.get("prompt_tokens_details")
    cached = _whole_number(details.get("cached_tokens")) if isinstance(details, Mapping) else None
    prompt, output = counts
    return _Usage(prompt, output, max(0, cached or 0))


def _read_choices(data: msgspec.Raw) -> list[Any]:
    return _decoded(data, list) or []


def _whole_number(value: Any) -> int | None:
    """Return a number, be it written as 20.0; None where it is none."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return int(value) if is_whole or (isinstance(value, float) and value.is_integer()) else None


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
