"""Requests as the bytes of an HTTP body, in the dialect that a server speaks.

Knows nothing of connections or answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.tools.bench.workload import PlannedRequest, Workload

# Short, frequent words, which nearly every vocabulary holds as one token with the space before it: a text of so many
# words is close to so many tokens. What it came to is in the server's usage.
_TEXT = (
    "the of and to in is was for on that by this with you it not or be are from at as your all have new more an "
    "we will home can us about if page my has search free but our one other do no time they site he up may what "
    "which their out use any there see only so his when here who also now help get view first am been would how "
    "were some these its like than find date back top people had list name just over state year day into two go"
)
_WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a server wants to be asked."""

    chat: bool = False
    text: bool = False  # prompts as text instead of token ids; a chat always is
    ignore_eos: bool = True  # send the field: answers are then as long as asked for
    usage: bool = True  # ask for the number of tokens at the end of the stream

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    @property
    def prompts(self) -> str:
        return "chat messages" if self.chat else "text" if self.text else "token ids"


def words_of(token_ids: Sequence[int]) -> str:
    """Return a text of as many words as there are tokens: equal beginnings of ids are equal beginnings of text."""
    return " ".join([_WORDS[token % len(_WORDS)] for token in token_ids])


def write_body(workload: Workload, request: PlannedRequest, dialect: Dialect, model: str) -> bytes:
    """Return the body that asks for one request's answer as a stream."""
    ids = workload.token_ids(request)
    body: dict[str, Any] = {"model": model}
    if dialect.chat:
        body["messages"] = [{"role": "user", "content": words_of(ids)}]
    else:
        body["prompt"] = words_of(ids) if dialect.text else ids
    body |= {"max_tokens": request.max_tokens, "temperature": workload.temperature, "stream": True}
    if dialect.ignore_eos:
        body["ignore_eos"] = True
    if dialect.usage:
        body["stream_options"] = {"include_usage": True}
    return msgspec.json.encode(body)
