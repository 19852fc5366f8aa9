"""One answer as it is measured: when it began, came and ended, and what it said.

Fed by whoever passes the answer on or throws it away. Bounded. Knows nothing of who asked for it.
"""

import re
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.fleet.rollout.scores import Score, read_scores

MAX_KEPT_BYTES = 256 * 1024  # of an answer that is kept to be compared
_CHARACTERS_PER_TOKEN = 4  # where only texts can be compared
_LEAST_TOKENS = 4  # of an answer whose time per token counts
# The last frame of a stream does not tell its tokens: so many that may have no text, and as many as it has characters,
# where a busy server was late with them.
_UNTOLD_TOKENS = 8
# Servers end an event's lines with \r\n or \n, and a space before its data may be missing.
_EVENT = re.compile(rb"^data: ?(?=\{)", re.MULTILINE)
_END = re.compile(rb"\r?\n\r?\n")


class _Message(msgspec.Struct):
    content: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    logprobs: msgspec.Raw = msgspec.Raw(b"null")
    message: _Message = msgspec.field(default_factory=_Message)
    delta: _Message = msgspec.field(default_factory=_Message)


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Answer)


@dataclass(slots=True)
class Trial:
    """One version's answer to one request."""

    version: str
    keeps_text: bool = True  # for a comparison, where the stream tells no tokens
    has_scores: bool = False  # log-probabilities were asked for: they are kept too, and compared
    began_at: float = field(default_factory=time.monotonic)
    first_at: float | None = None  # the first byte of a stream's answer
    ended_at: float | None = None
    has_failed: bool = False
    was_hindered: bool = False  # its reader was slow: its times say nothing
    token_ids: list[int] | None = None  # where the stream told them
    most_untold_tokens: int = _UNTOLD_TOKENS  # that may stand behind those
    num_events: int = 0
    is_whole: bool = False  # not a stream
    data: bytearray = field(default_factory=bytearray)

    def fail(self) -> None:
        self.has_failed = True

    def feed(self, data: bytes) -> None:
        """Take a piece of a stream that tells no tokens."""
        if self.first_at is None:
            self.first_at = time.monotonic()
        self.num_events += len(_EVENT.findall(data))
        if self.keeps_text and len(self.data) < MAX_KEPT_BYTES:
            self.data += data

    def keep(self, events: bytes) -> None:
        """Take a piece of a stream that tells its tokens: only for their scores."""
        if self.has_scores and len(self.data) < MAX_KEPT_BYTES:
            self.data += events

    def end(
        self, choices: list[list[int]] | None = None, first_at: float | None = None, last_events: bytes = b""
    ) -> None:
        """Take that a stream came to its end.

        Of one that was not fed its choices' tokens, when it began, and the events behind all tokens are told.
        """
        self.ended_at = time.monotonic()
        # Several choices take turns: neither their times nor where they part tell much.
        self.token_ids = choices[0] if choices is not None and len(choices) == 1 else None
        self.most_untold_tokens += sum(len(_said(choice)) for choice in _streamed_choices(last_events))
        self.first_at = first_at or self.first_at

    def take_whole(self, body: bytes) -> None:
        """Take an answer that came at once."""
        self.ended_at = time.monotonic()
        self.is_whole = True
        self.data += body[:MAX_KEPT_BYTES]

    @property
    def is_measured(self) -> bool:
        """Whether it tells something of its version: an answer to its end, or a failure."""
        return self.has_failed or self.ended_at is not None

    @property
    def seconds(self) -> float:
        return (self.ended_at or time.monotonic()) - self.began_at

    @property
    def ttft_seconds(self) -> float | None:
        if self.first_at is None or self.ended_at is None or self.has_failed:
            return None
        return self.first_at - self.began_at

    def time_per_token_seconds(self) -> float | None:
        if self.ended_at is None or self.has_failed or self.was_hindered:
            return None
        if self.is_whole:
            answer = _read(bytes(self.data))
            count = answer.usage.completion_tokens if answer is not None and answer.usage is not None else 0
            return self.seconds / count if count >= _LEAST_TOKENS else None
        count = len(self.token_ids) if self.token_ids is not None else self.num_events
        if self.first_at is None or count < _LEAST_TOKENS:
            return None
        return (self.ended_at - self.first_at) / (count - 1)

    def text(self) -> str:
        """Return the first choice's text, as far as it was kept."""
        return "".join(_said(choice) for choice in self._first_choice())

    def scores(self) -> list[Score]:
        """Return what the first choice says of its tokens' log-probabilities, as far as it was kept."""
        if not self.has_scores or self.has_failed:
            return []
        return [score for choice in self._first_choice() for score in read_scores(bytes(choice.logprobs))]

    def _first_choice(self) -> list[_Choice]:
        """Return the first choice as it came: whole, or in pieces."""
        if not self.is_whole:
            return _streamed_choices(bytes(self.data))
        answer = _read(bytes(self.data))
        return [choice for choice in answer.choices if choice.index == 0] if answer is not None else []


def compare_outputs(stable: Trial, candidate: Trial) -> tuple[int, bool] | None:
    """Return how many tokens were compared, the first that differs included, and whether one did.

    None where there is nothing to compare. Texts count as a token for every four characters.
    """
    if stable.token_ids is not None and candidate.token_ids is not None:
        same, shorter, longer = _common(stable.token_ids, candidate.token_ids)
        untold = min((stable, candidate), key=lambda trial: len(trial.token_ids or ())).most_untold_tokens
        differs = same < shorter or longer - shorter > untold
        return None if longer == 0 else (same + int(differs), differs)
    if stable.token_ids is not None or candidate.token_ids is not None:
        return None
    texts = stable.text(), candidate.text()
    same, shorter, longer = _common(*texts)
    if longer == 0:
        return None
    is_cut = min(len(stable.data), len(candidate.data)) >= MAX_KEPT_BYTES
    differs = same < shorter or (longer > shorter and not is_cut)
    return max(1, same // _CHARACTERS_PER_TOKEN + int(differs)), differs


def _common(one: list[int] | str, other: list[int] | str) -> tuple[int, int, int]:
    """Return how many items two sequences begin with in common, and the lengths of the shorter and the longer."""
    shorter, longer = sorted((len(one), len(other)))
    same = next((place for place in range(shorter) if one[place] != other[place]), shorter)
    return same, shorter, longer


def _streamed_choices(data: bytes) -> list[_Choice]:
    """Return the first choice's pieces in a stream's events."""
    begun = ((event, _EVENT.search(event)) for event in _END.split(data))
    answers = [_read(event[found.end() :]) for event, found in begun if found is not None]
    return [choice for answer in answers if answer is not None for choice in answer.choices if choice.index == 0]


def _said(choice: _Choice) -> str:
    for message in (choice.message, choice.delta):
        if message.tool_calls:
            return (message.content or "") + msgspec.json.encode(_without_ids(message.tool_calls)).decode()
    return choice.text or choice.message.content or choice.delta.content or ""


def _without_ids(calls: Any) -> Any:
    if not isinstance(calls, list):
        return calls
    return [{key: call[key] for key in call if key != "id"} if isinstance(call, dict) else call for call in calls]


def _read(data: bytes) -> _Answer | None:
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
