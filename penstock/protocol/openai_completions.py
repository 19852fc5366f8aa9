"""The wire types of /v1/completions.

Knows nothing of tokenizers or HTTP.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BeforeValidator, Field, WithJsonSchema

from penstock.errors import InvalidParameter, UnsupportedParameter
from penstock.protocol.generation import MAX_CHOICES, GenerationRequest, Usage
from penstock.request import MAX_LOGPROBS

DEFAULT_MAX_TOKENS = 16

# ---------------------------------------------------------------- request


def _prompt_list(value: Any) -> Any:
    """Return a list of prompts, each a text or a list of token ids."""
    right = "give a text, a list of texts, a list of token ids or a list of lists of token ids"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError(right)
    is_alike = next((is_kind for is_kind in (_is_text, _is_token_id, _are_token_ids) if is_kind(value[0])), None)
    if is_alike is not _is_token_id and len(value) > MAX_CHOICES:
        raise ValueError(f"prompts × n may be at most {MAX_CHOICES}")
    if is_alike is None or not all(map(is_alike, value)):
        wrong = 0 if is_alike is None else next(place for place, item in enumerate(value) if not is_alike(item))
        raise ValueError(f"{right}: entry {wrong} is something else")
    return [value] if is_alike is _is_token_id else value


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_token_id(value: Any) -> bool:
    return type(value) is int


def _are_token_ids(value: Any) -> bool:
    """One without any is for the check of each prompt, which says which one it is."""
    return isinstance(value, list) and all(type(item) is int for item in value)


_TOKEN_IDS = {"type": "array", "items": {"type": "integer"}}
PromptList = Annotated[
    list[str | Annotated[list[int], Field(fail_fast=True)]],
    Field(fail_fast=True),
    BeforeValidator(_prompt_list),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS},
            ]
        }
    ),
]


class CompletionRequest(GenerationRequest):
    """Texts or token ids to be continued by the model as they are, without a chat template."""

    IGNORED: ClassVar[Mapping[str, type]] = MappingProxyType({"user": str})
    REFUSED: ClassVar[Mapping[str, tuple[object, ...]]] = MappingProxyType({"suffix": ("",)})

    prompt: PromptList
    echo: bool | None = Field(None, description="Put the prompt before the answer")
    best_of: int | None = Field(None, description="Must equal n where it is given")
    logprobs: int | None = Field(
        None, description=f"0 to {MAX_LOGPROBS}: the log-probability of each token and so many of the likeliest"
    )

    def check_combinations(self) -> None:
        super().check_combinations()
        if self.best_of not in (None, self.num_choices):
            raise UnsupportedParameter("best_of", self.best_of, f"leave it out or give n ({self.num_choices})")
        num_answers = len(self.prompt) * self.num_choices
        if num_answers > MAX_CHOICES:
            right = f"{len(self.prompt)} prompts × n ({self.num_choices}) are {num_answers}; give at most {MAX_CHOICES}"
            raise InvalidParameter("prompt", self.prompt, right)
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidParameter("logprobs", self.logprobs, f"give an integer from 0 to {MAX_LOGPROBS}")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidParameter("max_tokens", 0, "give at least 1, or set echo to score the prompt alone")
        if self.max_tokens == 0 and self.min_tokens:
            raise InvalidParameter("min_tokens", self.min_tokens, "give at most max_tokens (0)")

    @property
    def only_scores_prompt(self) -> bool:
        return self.max_tokens == 0 and bool(self.echo)


# ---------------------------------------------------------------- response


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Parallel lists, one entry a token. The first token of an echoed prompt has no log-probability: null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, or one event of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
