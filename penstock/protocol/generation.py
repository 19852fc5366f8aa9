"""What chat and text completions have in common: how to sample, when to stop, what it cost.

Requests are pydantic models (input is hostile); responses are msgspec structs (output is ours and must be fast).
"""

import re
from typing import Annotated, Any

import msgspec
from pydantic import BeforeValidator, Field, WithJsonSchema

from penstock.errors import InvalidParameter, UnsupportedParameter
from penstock.protocol.wire import WireModel, at_most
from penstock.request import NO_TARGETS, SamplingParams, Targets

MAX_CHOICES = 128
MAX_CONTINUED = 4096  # choices of all prompts together
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_TOKEN_LIST = 1024
MAX_MILLISECONDS = 7 * 24 * 3600 * 1000

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


class StreamOptions(WireModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


Milliseconds = Annotated[float | None, Field(gt=0, le=MAX_MILLISECONDS)]


class WantedTargets(WireModel):
    """What the caller wants of the answer's pace."""

    ttft_ms: Milliseconds = Field(None, description="From the request's arrival to the first token")
    time_per_token_ms: Milliseconds = Field(None, description="The mean over the tokens behind the first")


def _stop_list(value: Any) -> Any:
    if value is not None and not isinstance(value, str | list):
        raise ValueError("give a string or a list of strings")
    return [value] if isinstance(value, str) else value


StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopList = Annotated[
    list[StopText] | None,
    Field(
        max_length=MAX_STOPS,
        fail_fast=True,
        description=f"Up to {MAX_STOPS} texts; the answer ends before the first that appears",
    ),
    BeforeValidator(_stop_list),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}),
]
TokenList = Annotated[list[int] | None, Field(max_length=MAX_TOKEN_LIST, fail_fast=True)]
BiasMap = Annotated[dict[str, float] | None, at_most(MAX_TOKEN_LIST)]


class ContinueFrom(WireModel):
    """An answer that another server of the same model began: it goes on behind these tokens as if it had been one."""

    id: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="The id of the chunks already sent")
    created: int = Field(ge=0, le=2**53, description="Their time")
    token_ids: list[Annotated[list[int], Field(fail_fast=True)]] = Field(
        min_length=1,
        max_length=MAX_CONTINUED,
        fail_fast=True,
        description="The tokens they told, all of them, for each choice",
    )
    ended: list[int] | None = Field(
        None, max_length=MAX_CONTINUED, fail_fast=True, description="The choices that had ended, by index"
    )


class GenerationRequest(WireModel):
    """The parameters that both completion endpoints take. null means the default everywhere."""

    model: str = Field(description="A name that /v1/models lists")
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it is made")
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="How many answers to each prompt")
    max_tokens: int | None = Field(None, description="Most tokens in an answer")
    min_tokens: int | None = Field(None, description="No stop token or stop text ends the answer before so many tokens")
    temperature: float | None = Field(None, description="0: always the likeliest token; default 1")
    top_p: float | None = Field(None, description="Sample from the likeliest tokens that hold this probability")
    top_k: int | None = Field(None, description="Sample from this many of the likeliest tokens; 0: no limit")
    min_p: float | None = Field(None, description="Leave out tokens under this part of the best one's probability")
    seed: int | None = Field(None, description="With precision exact the same seed gives the same sample")
    stop: StopList = None
    stop_token_ids: TokenList = None
    ignore_eos: bool | None = Field(None, description="Go on after the model's end-of-text token")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: BiasMap = Field(None, description=f"Up to {MAX_TOKEN_LIST} token ids, each to a bias from -100 to 100")

    priority: int | None = Field(None, description="-10 to 10, larger goes first; a key may allow less")
    targets: WantedTargets | None = Field(
        None, description="What cannot be met is refused at once, with 429 and a time to come back"
    )
    deadline_ms: Milliseconds = Field(None, description="The request ends so long after its arrival, whatever it has")
    best_effort: bool | None = Field(None, description="Rather late than refused, where targets cannot be met")

    continue_from: ContinueFrom | None = Field(
        None, description="For gateways: go on with a streamed answer that another server began"
    )

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def wants_stream(self) -> bool:
        return bool(self.stream)

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check_combinations(self) -> None:
        """Raise for what each field allows but the whole does not."""
        if self.stream_options is None:
            return
        if not self.wants_stream:
            given = self.stream_options.model_dump(exclude_unset=True)
            raise InvalidParameter("stream_options", given, "give it only with stream=true")
        if self.stream_options.include_obfuscation:
            raise UnsupportedParameter("stream_options.include_obfuscation", True, "leave it out or give false")

    def wanted_targets(self) -> Targets:
        wanted = self.targets
        if wanted is None:
            return NO_TARGETS
        return Targets(_seconds(wanted.ttft_ms), _seconds(wanted.time_per_token_ms))

    def sampling_params(
        self, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> SamplingParams:
        """Return the engine's parameters. Ranges are for `SamplingParams.validate` to check."""
        given = {
            "min_tokens": self.min_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "ignore_eos": self.ignore_eos,
        }
        changed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(
            max_tokens=max_tokens,
            seed=self.seed,
            logit_bias=self._token_biases(),
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            **changed,
        )

    def _token_biases(self) -> dict[int, float]:
        biases = {}
        for key, bias in (self.logit_bias or {}).items():
            # As JSON writes a number: other spellings, such as 042, could name one token twice.
            if not _TOKEN_ID.fullmatch(key):
                raise InvalidParameter("logit_bias", key, 'give token ids as keys, such as {"42": -100}')
            biases[int(key)] = bias
        return biases


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """What a call cost. Prompt tokens count once, however many answers were made of them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
