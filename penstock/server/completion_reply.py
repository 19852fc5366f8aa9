"""How /v1/completions writes an answer."""

import msgspec
from msgspec import UNSET, UnsetType

from penstock.engine.tokenizer import Detokenizer, Tokenizer
from penstock.protocol.generation import Usage
from penstock.protocol.openai_completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from penstock.server.answer import Choice
from penstock.server.continuation import Begun
from penstock.server.openai_reply import OpenAiReply
from penstock.server.streaming import event
from penstock.server.text_assembly import TextPiece
from penstock.server.token_text import completion_logprobs, prompt_logprobs


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

    def events(self, choice: Choice, piece: TextPiece) -> bytes:
        first = choice.index not in self._begun
        self._begun.add(choice.index)
        shown = self._choice(choice, piece, with_prompt=self._echo and first)
        return event(self._completion([shown], None if self._with_usage else UNSET))

    def usage_event(self, usage: Usage) -> bytes:
        return event(self._completion([], usage)) if self._with_usage else b""

    def whole(self, texts: list[tuple[Choice, TextPiece]], usage: Usage) -> bytes:
        choices = [self._choice(choice, piece, with_prompt=self._echo) for choice, piece in texts]
        return msgspec.json.encode(self._completion(choices, usage))

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _choice(self, choice: Choice, piece: TextPiece, *, with_prompt: bool) -> CompletionChoice:
        text = (self._prompt_text(choice) if with_prompt else "") + piece.text
        logprobs = self._logprobs(choice, piece, with_prompt=with_prompt) if self._with_logprobs else None
        return CompletionChoice(choice.index, text, logprobs, None if piece.finish is None else str(piece.finish))

    def _logprobs(self, choice: Choice, piece: TextPiece, *, with_prompt: bool) -> CompletionLogprobs:
        base = len(self._prompt_text(choice)) if self._echo else 0
        answer = completion_logprobs(self._tokenizer, piece.tokens, base=base)
        if not with_prompt:
            return answer
        prompt = prompt_logprobs(self._tokenizer, choice.prompt.token_ids, choice.prompt_logprobs)
        return CompletionLogprobs(
            prompt.tokens + answer.tokens,
            prompt.token_logprobs + answer.token_logprobs,
            prompt.top_logprobs + answer.top_logprobs,
            prompt.text_offset + answer.text_offset,
        )

    def _prompt_text(self, choice: Choice) -> str:
        prompt = choice.prompt
        if prompt.unfinished:
            return Detokenizer(self._tokenizer).push(prompt.token_ids)  # the answer has its last character
        return prompt.text if prompt.text is not None else self._tokenizer.decode(prompt.token_ids)
