"""The choices of one API call: each an engine request of its own, read together.

Turns engine events into pieces of text and engine failures into errors of the catalogue. Knows nothing of HTTP or of
the shape of any API.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from penstock.engine.client import TokenStream
from penstock.engine.messages import TokenEvent
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
from penstock.server.text_assembly import TextAssembler, TextPiece


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as it goes to the engine, and its text where the caller gave one."""

    token_ids: list[int]
    text: str | None = None
    unfinished: bytes = b""  # of its last character, where it is shown with the answer, which may complete it


class Choice:
    """One answer to one prompt."""

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        stream: TokenStream | None,
        assembler: TextAssembler,
        *,
        only_scores_prompt: bool,
        finish: FinishReason | None = None,
    ) -> None:
        """Without a stream it has ended elsewhere, for the reason `finish`."""
        self.index = index
        self.prompt = prompt
        self.num_cached_tokens = 0
        self.note: PromptNote | None = None  # of its prompt, where the engine told
        self.prompt_logprobs: list[float | None] | None = None
        self.finish = finish
        self.new_token_ids: list[int] = []  # that the last piece told of
        self._untold: list[int] = []  # whose scores, and so whose text, have not been shown
        self._stream = stream
        self.is_from_elsewhere = stream is None
        self._ended = stream is None  # for the engine
        self._assembler = assembler
        self._only_scores_prompt = only_scores_prompt

    @property
    def num_tokens(self) -> int:
        """Tokens made so far that the caller pays for."""
        return 0 if self._only_scores_prompt else self._assembler.num_tokens

    async def read(self) -> TextPiece:
        """Wait for the next piece that holds something. Raises when the engine failed or refused the request."""
        assert self._stream is not None
        async for event in self._stream:
            self._untold += event.token_ids
            self._ended = self._ended or event.finish is not None
            if event.finish in (FinishReason.ERROR, FinishReason.ABORT):
                raise _failure(event)
            self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
            self.note = event.prompt or self.note
            if event.prompt_logprobs is not None:
                self.prompt_logprobs = event.prompt_logprobs
            piece = self._assembler.push(event)
            if self._only_scores_prompt:
                piece = TextPiece(finish=piece.finish and FinishReason.LENGTH)
            if piece.finish is not None:
                self.finish = piece.finish
                if event.finish is None:
                    self.abort(FinishReason.STOP)  # a stop string: the engine need not go on behind it
            if not piece.is_empty:
                self._tell(piece)
                return piece
        raise EngineFailed("the engine stopped answering before the request was done; try again")

    def _tell(self, piece: TextPiece) -> None:
        """Note which tokens a piece tells of: with scores only those shown, else all that were made."""
        whole = piece.finish is not None or not self._assembler.is_scored
        num_told = len(self._untold) if whole else len(piece.tokens)
        self.new_token_ids, self._untold = self._untold[:num_told], self._untold[num_told:]

    def abort(self, reason: FinishReason = FinishReason.ABORT) -> None:
        """Tell the engine to stop, unless it has been told or has ended."""
        if not self._ended and self._stream is not None:
            self._ended = True
            self._stream.abort(reason)


class Answer:
    """All choices of one API call: the same number for each of its prompts."""

    def __init__(self, prompts: Sequence[Prompt], choices: Sequence[Choice], charge: Charge) -> None:
        self.prompts = prompts
        self.choices = choices
        self.charge = charge

    async def batches(self) -> AsyncGenerator[list[tuple[Choice, TextPiece]], None]:
        """Yield the pieces that are there together, until every choice has finished."""
        if len(self.choices) == 1:
            choice = self.choices[0]
            while choice.finish is None:
                yield [(choice, await choice.read())]
            return
        reads = {asyncio.create_task(choice.read()): choice for choice in self.choices if choice.finish is None}
        try:
            while reads:
                await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
                batch = []
                for task in [task for task in reads if task.done()]:
                    piece = task.result()
                    choice = reads.pop(task)
                    batch.append((choice, piece))
                    if choice.finish is None:
                        reads[asyncio.create_task(choice.read())] = choice
                yield batch
        finally:
            for task in reads:
                task.cancel()
            await asyncio.gather(*reads, return_exceptions=True)

    def abort(self) -> None:
        """Tell the engine to stop every choice. May be called at any time and again."""
        for choice in self.choices:
            choice.abort()

    def prompt_note(self) -> PromptNote:
        """Return what a gateway may know of the first prompt; before its first token that is its length alone."""
        choice = self.choices[0]
        return choice.note or PromptNote(len(choice.prompt.token_ids), choice.num_cached_tokens)

    def usage(self) -> Usage:
        """Return what the call cost so far; each prompt counts once."""
        num_prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        # What one choice left in the cache for the next was not there before this call.
        num_cached_tokens = sum(
            min((choice.num_cached_tokens for choice in self._run_here(prompt)), default=0) for prompt in self.prompts
        )
        num_tokens = sum(choice.num_tokens for choice in self.choices)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_tokens,
            total_tokens=num_prompt_tokens + num_tokens,
            prompt_tokens_details=PromptTokensDetails(num_cached_tokens),
        )

    def _run_here(self, prompt: Prompt) -> list[Choice]:
        return [choice for choice in self.choices if choice.prompt is prompt and not choice.is_from_elsewhere]


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
