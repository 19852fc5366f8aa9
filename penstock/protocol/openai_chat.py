"""The wire types of /v1/chat/completions.

Knows nothing of templates, tokens or HTTP.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, WithJsonSchema, model_validator

from penstock.errors import InvalidParameter
from penstock.protocol.generation import GenerationRequest, Usage
from penstock.protocol.labels import Labels
from penstock.protocol.wire import WireModel, object_schema, refuse_nul, request_error
from penstock.request import MAX_COUNT, MAX_LOGPROBS

MAX_MESSAGES = 8192
MAX_PARTS = 8192  # of a message
MAX_NAME_CHARACTERS = 64
# Of a text part; the last is OpenAI's, and changes nothing here.
_PART_FIELDS = frozenset(("type", "text", "prompt_cache_breakpoint"))

# ---------------------------------------------------------------- request


def _joined_text(content: Any) -> Any:
    """Return a text, or that of a list of text parts, one part a line."""
    right = 'give a string or a list of parts such as {"type": "text", "text": "..."}'
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(right)
    if not 1 <= len(content) <= MAX_PARTS:
        raise ValueError(f"give 1 to {MAX_PARTS} parts")
    texts = []
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise ValueError(right)
        if part["type"] != "text":
            raise ValueError(f"parts of type {part['type'][:40]!r} are not supported; give text parts")
        if not isinstance(part.get("text"), str):
            raise ValueError("give each text part a 'text' that is a string")
        unknown = next((name for name in part if name not in _PART_FIELDS), None)
        if unknown is not None:
            raise ValueError(f"a text part has no field {str(unknown)[:40]!r}; give its 'type' and 'text'")
        if part.get("prompt_cache_breakpoint") is not None and not isinstance(part["prompt_cache_breakpoint"], dict):
            raise ValueError("give 'prompt_cache_breakpoint' an object, or leave it out")
        texts.append(part["text"])
    return "\n".join(texts)


_TEXT_PART = object_schema({"type": {"const": "text"}, "text": {"type": "string"}})
MessageContent = Annotated[
    str,
    BeforeValidator(_joined_text),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART, "minItems": 1}]}),
]


MessageName = Annotated[str | None, Field(max_length=MAX_NAME_CHARACTERS)]


class ChatMessage(WireModel):
    """One turn. Text parts are joined by line breaks."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: MessageContent
    name: MessageName = None
    tool_call_id: MessageName = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_extras(cls, message: Any) -> Any:
        """Accept an answer of ours as it came: its fields that hold nothing may stay."""
        if not isinstance(message, dict):
            return message
        extras = ("tool_calls", "function_call", "refusal", "audio", "annotations")
        for extra in extras:
            if message.get(extra):
                raise ValueError(f"{extra} in a message is not supported; leave it out")
        return {name: value for name, value in message.items() if name not in extras}

    @property
    def num_characters(self) -> int:
        return len(self.content) + len(self.name or "") + len(self.tool_call_id or "")

    def for_template(self) -> dict[str, str]:
        fields = {"role": self.role, "content": self.content, "name": self.name, "tool_call_id": self.tool_call_id}
        return {name: value for name, value in fields.items() if value is not None}


# The first wrong one is told: there may be thousands.
MessageList = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
_MESSAGES: TypeAdapter[list[ChatMessage]] = TypeAdapter(MessageList)


def check_messages(messages: object) -> list[ChatMessage]:
    """Return messages that came without a request around them. Raises RequestError, as for those of a request."""
    try:
        checked = _MESSAGES.validate_python(messages)
    except ValidationError as error:
        raise request_error(error, ChatMessage.GUIDE, within=("messages",)) from None
    for place, message in enumerate(checked):
        refuse_nul(message.for_template(), ("messages", place))
    return checked


class ChatRequest(GenerationRequest):
    """A conversation to be continued by the model."""

    IGNORED: ClassVar[Mapping[str, type]] = MappingProxyType(
        {
            "user": str,
            "store": bool,
            "service_tier": str,
            "parallel_tool_calls": bool,
            "safety_identifier": str,
            "prompt_cache_key": str,
            "prompt_cache_retention": str,
            "prompt_cache_options": dict,
            "prediction": dict,
        }
    )
    REFUSED: ClassVar[Mapping[str, tuple[object, ...]]] = MappingProxyType(
        {
            "tools": ([],),
            "tool_choice": ("none",),  # "auto" is for requests that have tools
            "functions": ([],),
            "function_call": ("none",),
            "response_format": ({"type": "text"},),
            "modalities": (["text"],),
            "audio": (),
            "web_search_options": (),
            "moderation": (),
            "reasoning_effort": ("none",),
            "verbosity": ("medium",),
        }
    )

    messages: MessageList
    metadata: Labels | None = Field(None, description="Accepted, and not kept")
    max_completion_tokens: int | None = Field(None, description="The newer name of max_tokens")
    logprobs: bool | None = Field(None, description="Return the log-probability of each token of the answer")
    top_logprobs: int | None = Field(None, description="And of so many of the likeliest tokens in its place")

    def answer_limit(self) -> int | None:
        """Return the most tokens the caller wants, None for as many as fit."""
        if self.max_completion_tokens is None:
            return self.max_tokens
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise InvalidParameter("max_tokens", self.max_tokens, "give it or max_completion_tokens, not both")
        if not 1 <= self.max_completion_tokens <= MAX_COUNT:
            right = f"give an integer from 1 to {MAX_COUNT}"
            raise InvalidParameter("max_completion_tokens", self.max_completion_tokens, right)
        return self.max_completion_tokens

    def num_logprobs(self) -> int | None:
        if self.top_logprobs is not None:
            if not self.logprobs:
                raise InvalidParameter("top_logprobs", self.top_logprobs, "give it only with logprobs=true")
            if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
                right = f"give an integer from 0 to {MAX_LOGPROBS}"
                raise InvalidParameter("top_logprobs", self.top_logprobs, right)
        return (self.top_logprobs or 0) if self.logprobs else None


# ---------------------------------------------------------------- response


# There may be thousands of these two at a time, and none is ever part of a cycle.
class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    token: str
    logprob: float
    bytes: tuple[int, ...]


class ContentLogprob(msgspec.Struct, frozen=True, gc=False):
    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, frozen=True):
    content: list[ContentLogprob]
    refusal: None = None


class AnswerMessage(msgspec.Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(msgspec.Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed answer. `usage` is null until the last one, and absent unless asked for."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
