"""How /v1/completions writes an answer."""

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from penstock.engine.tokenizer import Tokenizer
from penstock.protocol.generation import Usage
from penstock.protocol.openai_completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from penstock.server.answer import Choice
from penstock.server.continuation import Begun
from penstock.server.echoed_prompt import ScoredText, echo_prompt
from penstock.server.json_parts import LIST_HOLE, TEXT_HOLE, Body, Part, filled, joined
from penstock.server.loop_turns import LoopTurns
from penstock.server.openai_reply import OpenAiReply
from penstock.server.streaming import event, event_around
from penstock.server.text_assembly import TextPiece
from penstock.server.token_text import completion_logprobs


class CompletionReply(OpenAiReply):
    def __init__(
        self,
        tokenizer: Tokenizer,
        completion_id: str,
        wanted: CompletionRequest,
        begun: Begun | None,
        *,
        with_logprobs: bool,
    ) -> None:
        super().__init__(tokenizer, completion_id, wanted, begun, with_logprobs=with_logprobs)
        self._echo = bool(wanted.echo)
        self._echoed: dict[tuple[int, bool], ScoredText] = {}  # by prompt, and whether its scores were there
        self._kept: dict[int, ScoredText] = {}

    async def prepare(self, choice: Choice, turns: LoopTurns) -> None:
        if self._echo and self._echo_key(choice) not in self._echoed:
            echoed = await echo_prompt(
                self._tokenizer, choice.prompt, choice.prompt_logprobs, turns, with_scores=self._with_logprobs
            )
            self._echoed[self._echo_key(choice)] = echoed

    def events(self, choice: Choice, piece: TextPiece) -> bytes:
        usage = None if self._with_usage else UNSET
        first = choice.index not in self._begun
        self._begun.add(choice.index)
        finish, logprobs = None if piece.finish is None else str(piece.finish), self._logprobs(choice, piece)
        if not (self._echo and first):
            return event(self._completion([CompletionChoice(choice.index, piece.text, logprobs, finish)], usage))
        shown = ScoredText()
        shown.add(piece.text, logprobs)
        parts = self._choice_parts(choice, shown, finish)
        return event_around(Body(filled(self._completion(LIST_HOLE, usage), parts)).whole())

    def usage_event(self, usage: Usage) -> bytes:
        return event(self._completion([], usage)) if self._with_usage else b""

    def keep(self, choice: Choice, piece: TextPiece) -> None:
        self._kept.setdefault(choice.index, ScoredText()).add(piece.text, self._logprobs(choice, piece))

    def body(self, choices: Sequence[Choice], usage: Usage) -> Body:
        shown = [self._choice_parts(choice, self._kept.pop(choice.index), str(choice.finish)) for choice in choices]
        return Body(filled(self._completion(LIST_HOLE, usage), joined(*shown)))

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _choice_parts(self, choice: Choice, shown: ScoredText, finish: str | None) -> list[Part]:
        """Return a choice with its prompt where that is echoed."""
        together = [self._echoed_of(choice), shown] if self._echo else [shown]
        text = [part.text.data for part in together]
        if not self._with_logprobs:
            return filled(CompletionChoice(choice.index, TEXT_HOLE, None, finish), text)
        columns = zip(*[part.scores for part in together], strict=True)
        lists = [joined(*[[grown.data] for grown in column]) for column in columns]
        holes = CompletionLogprobs(LIST_HOLE, LIST_HOLE, LIST_HOLE, LIST_HOLE)
        return filled(CompletionChoice(choice.index, TEXT_HOLE, holes, finish), text, *lists)

    def _logprobs(self, choice: Choice, piece: TextPiece) -> CompletionLogprobs | None:
        if not self._with_logprobs:
            return None
        base = self._echoed_of(choice).num_characters if self._echo else 0
        return completion_logprobs(self._tokenizer, piece.tokens, base=base)

    def _echoed_of(self, choice: Choice) -> ScoredText:
        return self._echoed[self._echo_key(choice)]

    def _echo_key(self, choice: Choice) -> tuple[int, bool]:
        return id(choice.prompt), choice.prompt_logprobs is not None
