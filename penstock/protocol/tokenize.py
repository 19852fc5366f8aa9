"""The wire types of /tokenize and /detokenize."""

from typing import Annotated

import msgspec
from pydantic import Field

from penstock.errors import RequestError
from penstock.protocol.openai_chat import MessageList
from penstock.protocol.wire import WireModel


class TokenizeRequest(WireModel):
    """A text, or messages that go through the chat template first."""

    model: str | None = None
    prompt: str | None = None
    messages: MessageList | None = None
    add_special_tokens: bool | None = Field(None, description="Of a text; default true, as /v1/completions does")
    return_token_strs: bool | None = Field(None, description="Also return each token's text")

    def check_combinations(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")


class TokenizeResponse(msgspec.Struct, frozen=True):
    count: int
    max_context_tokens: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(WireModel):
    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str
