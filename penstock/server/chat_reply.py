"""How /v1/chat/completions writes an answer."""

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from penstock.engine.tokenizer import Tokenizer
from penstock.protocol.generation import Usage
from penstock.protocol.openai_chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatRequest,
    ChoiceLogprobs,
)
from penstock.server.answer import Choice
from penstock.server.continuation import Begun
from penstock.server.json_parts import LIST_HOLE, TEXT_HOLE, Body, Grown, Part, filled, joined
from penstock.server.openai_reply import OpenAiReply
from penstock.server.streaming import event
from penstock.server.text_assembly import TextPiece
from penstock.server.token_text import chat_logprobs


class _Kept:
    """A choice that will be sent whole, as the insides of its JSON."""

    def __init__(self) -> None:
        self.content = Grown()
        self.logprobs = Grown()


class ChatReply(OpenAiReply):
    def __init__(
        self,
        tokenizer: Tokenizer,
        completion_id: str,
        wanted: ChatRequest,
        begun: Begun | None,
        *,
        with_logprobs: bool,
    ) -> None:
        super().__init__(tokenizer, completion_id, wanted, begun, with_logprobs=with_logprobs)
        self._kept: dict[int, _Kept] = {}

    def events(self, choice: Choice, piece: TextPiece) -> bytes:
        """Return the role before a choice's first piece, its text, and behind the last its finish reason."""
        events = []
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            events.append(self._chunk(ChatChunkChoice(choice.index, ChatDelta(role="assistant", content=""))))
        if piece.text or piece.tokens:
            delta = ChatDelta(content=piece.text)
            events.append(self._chunk(ChatChunkChoice(choice.index, delta, self._logprobs(piece))))
        if piece.finish is not None:
            finished = ChatChunkChoice(choice.index, ChatDelta(), finish_reason=str(piece.finish))
            events.append(self._chunk(finished))
        return b"".join(events)

    def usage_event(self, usage: Usage) -> bytes:
        return self._chunk(usage=usage) if self._with_usage else b""

    def keep(self, choice: Choice, piece: TextPiece) -> None:
        kept = self._kept.setdefault(choice.index, _Kept())
        kept.content.add_text(piece.text)
        if self._with_logprobs:
            kept.logprobs.add_items(chat_logprobs(self._tokenizer, piece.tokens).content)

    def body(self, choices: Sequence[Choice], usage: Usage) -> Body:
        shown = [self._choice_parts(choice, self._kept.pop(choice.index)) for choice in choices]
        completion = ChatCompletion(
            id=self._id, created=self._created, model=self._model, choices=LIST_HOLE, usage=usage
        )
        return Body(filled(completion, joined(*shown)))

    def _choice_parts(self, choice: Choice, kept: _Kept) -> list[Part]:
        message, finish = AnswerMessage(TEXT_HOLE), str(choice.finish)
        if not self._with_logprobs:
            return filled(ChatChoice(choice.index, message, None, finish), [kept.content.data])
        shape = ChatChoice(choice.index, message, ChoiceLogprobs(LIST_HOLE), finish)
        return filled(shape, [kept.content.data], [kept.logprobs.data])

    def _logprobs(self, piece: TextPiece) -> ChoiceLogprobs | None:
        return chat_logprobs(self._tokenizer, piece.tokens) if self._with_logprobs else None

    def _chunk(self, *choices: ChatChunkChoice, usage: Usage | None = None) -> bytes:
        shown: Usage | UnsetType | None = usage if self._with_usage else UNSET
        return event(
            ChatChunk(id=self._id, created=self._created, model=self._model, choices=list(choices), usage=shown)
        )
