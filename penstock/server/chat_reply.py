"""How /v1/chat/completions writes an answer."""

import msgspec
from msgspec import UNSET, UnsetType

from penstock.protocol.generation import Usage
from penstock.protocol.openai_chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChoiceLogprobs,
)
from penstock.server.answer import Choice
from penstock.server.openai_reply import OpenAiReply
from penstock.server.streaming import event
from penstock.server.text_assembly import TextPiece
from penstock.server.token_text import chat_logprobs


class ChatReply(OpenAiReply):
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

    def whole(self, texts: list[tuple[Choice, TextPiece]], usage: Usage) -> bytes:
        choices = [
            ChatChoice(choice.index, AnswerMessage(piece.text), self._logprobs(piece), str(piece.finish))
            for choice, piece in texts
        ]
        completion = ChatCompletion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)
        return msgspec.json.encode(completion)

    def _logprobs(self, piece: TextPiece) -> ChoiceLogprobs | None:
        return chat_logprobs(self._tokenizer, piece.tokens) if self._with_logprobs else None

    def _chunk(self, *choices: ChatChunkChoice, usage: Usage | None = None) -> bytes:
        shown: Usage | UnsetType | None = usage if self._with_usage else UNSET
        return event(
            ChatChunk(id=self._id, created=self._created, model=self._model, choices=list(choices), usage=shown)
        )
