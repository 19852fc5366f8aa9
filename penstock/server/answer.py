"""The choices of one API call: each an engine request of its own, read together.

Turns engine events into pieces of text and engine failures into errors of the catalogue, a slice at a time: however
much has arrived for however many choices, others' answers go on. Knows nothing of HTTP or of the shape of any API.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from penstock.engine.messages import PromptLogprobs, TokenEvent
from penstock.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineUnavailable,
    Overloaded,
    PenstockError,
    RequestError,
    TargetUnreachable,
)
from penstock.metering.meter import Charge
from penstock.protocol.errors import CATALOGUE
from penstock.protocol.generation import PromptTokensDetails, Usage
from penstock.protocol.prompt_note import PromptNote
from penstock.request import FinishReason
from penstock.server.loop_turns import ENTRIES_A_PASS, LoopTurns
from penstock.server.text_assembly import TextAssembler, TextPiece

# So little needs no turn: what one step gives most answers.
LIGHT_ENTRIES = 16


class EventStream(Protocol):
    """One request's events, as `penstock.engine.client.TokenStream` gives them."""

    @property
    def has_more(self) -> bool: ...
    @property
    def num_waiting_tokens(self) -> int: ...
    def listen(self, on_arrival: Callable[[], None]) -> None: ...
    def take(self, max_tokens: int | None = None) -> TokenEvent | None: ...
    def abort(self, reason: FinishReason = FinishReason.ABORT) -> None: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as it goes to the engine, and its text where the caller gave one."""

    token_ids: list[int]
    text: str | None = None
    unfinished: bytes = b""  # of its last character, where it is shown with the answer, which may complete it


class PromptScores:
    """The log-probabilities of a prompt's tokens: one choice has the engine find them, for all of that prompt."""

    def __init__(self) -> None:
        self.logprobs: PromptLogprobs | None = None
        self.is_expected = True
        self._finder: int | None = None

    def is_found_by(self, index: int) -> bool:
        """Whether they are this choice's to find, which they are for the first that asks."""
        if self._finder is None:
            self._finder = index
        return self._finder == index

    def note(self, event: TokenEvent, *, is_last: bool) -> None:
        """Take them from an event of the choice that finds them."""
        if event.prompt_logprobs is not None:
            self.logprobs = event.prompt_logprobs
        self.is_expected = self.logprobs is None and not is_last


class Choice:
    """One answer to one prompt."""

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        stream: EventStream | None,
        assembler: TextAssembler,
        scores: PromptScores | None = None,
        *,
        only_scores_prompt: bool,
        finish: FinishReason | None = None,
    ) -> None:
        """Without a stream it has ended elsewhere, for the reason `finish`.

        `scores` are its prompt's, where it shows them.
        """
        self.index = index
        self.prompt = prompt
        self.num_cached_tokens = 0
        self.note: PromptNote | None = None  # of its prompt, where the engine told
        self.finish = finish
        self.new_token_ids: list[int] = []  # that the last piece told of
        self._num_unread = 0  # made for a caller who has gone
        self._untold: list[int] = []  # whose scores, and so whose text, have not been shown
        self._stream = stream
        self.is_from_elsewhere = stream is None
        self._ended = stream is None  # for the engine
        self._assembler = assembler
        self._only_scores_prompt = only_scores_prompt
        self._scores = scores

    @property
    def entries_a_token(self) -> int:
        """What each of its tokens makes to write: itself, its log-probability, and the best ones beside it."""
        return 1 + self._assembler.num_scores

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        return None if self._scores is None else self._scores.logprobs

    @property
    def must_wait(self) -> bool:
        """Whether another choice has yet to tell what this one shows."""
        return self._scores is not None and self._scores.is_expected and not self._scores.is_found_by(self.index)

    @property
    def has_more(self) -> bool:
        """Whether `read` has something to do."""
        return self.finish is None and self._stream is not None and self._stream.has_more

    @property
    def num_tokens(self) -> int:
        """Tokens made so far that the caller pays for."""
        return 0 if self._only_scores_prompt else self._assembler.num_tokens + self._num_unread

    def listen(self, on_arrival: Callable[[], None]) -> None:
        """Have this called whenever there is something to read."""
        assert self._stream is not None
        self._stream.listen(on_arrival)

    def read(self, max_tokens: int) -> tuple[TextPiece | None, int]:
        """Return the next piece, where what has arrived makes one, and how many tokens went into it.

        Raises when the engine failed or refused the request.
        """
        assert self._stream is not None
        event = self._stream.take(max_tokens)
        if event is None:
            return None, 0
        self._untold += event.token_ids
        self._ended = self._ended or event.finish is not None
        if event.finish in (FinishReason.ERROR, FinishReason.ABORT):
            raise _failure(event)
        self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
        self.note = event.prompt or self.note
        piece = self._assembler.push(event)
        if self._only_scores_prompt:
            piece = TextPiece(finish=piece.finish and FinishReason.LENGTH)
        if piece.finish is not None:
            self.finish = piece.finish
            if event.finish is None:
                self.abort(FinishReason.STOP)  # a stop string: the engine need not go on behind it
        if self._scores is not None and self._scores.is_found_by(self.index):
            self._scores.note(event, is_last=self.finish is not None)
        if not piece.is_empty:
            self._tell(piece)
        return None if piece.is_empty else piece, len(event.token_ids)

    def _tell(self, piece: TextPiece) -> None:
        """Note which tokens a piece tells of: with scores only those shown, else all that were made."""
        whole = piece.finish is not None or not self._assembler.is_scored
        num_told = len(self._untold) if whole else len(piece.tokens)
        self.new_token_ids, self._untold = self._untold[:num_told], self._untold[num_told:]

    def forsake(self) -> None:
        """Nobody will read what has arrived: it counts all the same, unless the answer ended before it."""
        if self.finish is None and self._stream is not None:
            self._num_unread = self._stream.num_waiting_tokens

    def abort(self, reason: FinishReason = FinishReason.ABORT) -> None:
        """Tell the engine to stop, unless it has been told or has ended."""
        if not self._ended and self._stream is not None:
            self._ended = True
            self._stream.abort(reason)


Batch = list[tuple[Choice, TextPiece]]


class Answer:
    """All choices of one API call: the same number for each of its prompts."""

    def __init__(self, prompts: Sequence[Prompt], choices: Sequence[Choice], charge: Charge, turns: LoopTurns) -> None:
        self.prompts = prompts
        self.choices = choices
        self.charge = charge
        self.turns = turns
        self._arrived = asyncio.Event()
        self._ready: dict[Choice, None] = {}  # that have something to read, in the order in which it came
        self._held: dict[Choice, None] = {}  # that would, but must wait for another

    async def batches(self) -> AsyncGenerator[Batch, None]:
        """Yield the pieces that are there together, one for a choice, until every choice has finished.

        Of much only a part at a time: whoever awaits the next lets others go on.
        """
        unfinished = [choice for choice in self.choices if choice.finish is None]
        for choice in unfinished:
            choice.listen(partial(self._note_arrival, choice))
        num_unfinished, is_behind = len(unfinished), False
        while num_unfinished:
            if not self._ready:
                self._arrived.clear()
                await self._arrived.wait()
            # Of each choice that is ready one token at the least.
            likely = sum([choice.entries_a_token for choice in self._ready])
            num_entries = ENTRIES_A_PASS if is_behind else min(likely, ENTRIES_A_PASS)
            if num_entries > LIGHT_ENTRIES:
                await self.turns.take(num_entries)
            batch = self._read_ready(num_entries)
            is_behind = bool(self._ready)
            num_unfinished -= len([piece for _, piece in batch if piece.finish is not None])
            if batch:
                yield batch

    def _note_arrival(self, choice: Choice) -> None:
        if choice.finish is not None:
            return
        if choice.must_wait:
            self._held[choice] = None
            return
        self._ready[choice] = None
        self._arrived.set()

    def _read_ready(self, num_entries: int) -> Batch:
        """Read so many tokens and log-probabilities of choices that have some, each once and one token at the least."""
        batch = []
        for choice in list(self._ready):
            if num_entries <= 0:
                break
            piece, num_tokens = choice.read(max(1, num_entries // choice.entries_a_token))
            num_entries -= choice.entries_a_token * max(1, num_tokens)
            del self._ready[choice]
            if piece is not None:
                batch.append((choice, piece))
            if choice.has_more:
                self._ready[choice] = None  # behind those that came meanwhile
        for choice in [choice for choice in self._held if not choice.must_wait]:
            del self._held[choice]
            self._ready[choice] = None
        return batch

    def abort(self) -> None:
        """Tell the engine to stop every choice. May be called at any time and again."""
        for choice in self.choices:
            choice.abort()

    def forsake(self) -> None:
        """The caller has gone. From now on `usage` has all that was made, whether or not it was read."""
        for choice in self.choices:
            choice.forsake()

    def prompt_note(self) -> PromptNote:
        """Return what a gateway may know of the first prompt; before its first token that is its length alone."""
        choice = self.choices[0]
        return choice.note or PromptNote(len(choice.prompt.token_ids), choice.num_cached_tokens)

    def usage(self) -> Usage:
        """Return what the call cost so far; each prompt counts once."""
        num_prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        # What one choice left in the cache for the next was not there before this call.
        cached: dict[int, int] = {}
        for choice in self.choices:
            if not choice.is_from_elsewhere:
                known = cached.get(id(choice.prompt), choice.num_cached_tokens)
                cached[id(choice.prompt)] = min(known, choice.num_cached_tokens)
        num_tokens = sum(choice.num_tokens for choice in self.choices)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_tokens,
            total_tokens=num_prompt_tokens + num_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(cached.values())),
        )


def _failure(event: TokenEvent) -> PenstockError:
    """Return the error that a request's last event stands for."""
    message = event.error or "the engine gave this request up; try again"
    if event.error_code == Overloaded.code:
        return Overloaded(message, retry_after_seconds=event.retry_after_seconds or 1.0)
    if event.error_code == TargetUnreachable.code:
        return TargetUnreachable(message, param=event.error_param)
    if event.error_code == DeadlineExceeded.code:
        return DeadlineExceeded(message)
    if event.error_code == EngineUnavailable.code:
        return EngineUnavailable(message)
    kind = CATALOGUE.get(event.error_code or "")
    if kind is not None and kind.status < 500:
        return RequestError(message, param=event.error_param)  # what the checks before the engine should have found
    return EngineFailed(message)
