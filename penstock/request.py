"""What a caller asks of the engine, and how it may end.

Shared by every layer. Knows nothing of HTTP, tokens' text or tensors.
"""

import contextlib
import enum
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import cast

import msgspec

from penstock.errors import ContextTooLong, InvalidParameter, RequestError

MAX_LOGPROBS = 20
MAX_COUNT = 2**31 - 1  # of tokens, where nothing else sets a limit
MAX_PRIORITY = 10  # and as low as minus this


class Tier(enum.StrEnum):
    """Whether anybody waits for the answer."""

    ONLINE = "online"
    BATCH = "batch"  # runs in capacity that online requests leave idle, and gives way to them


class Targets(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is wanted of an answer's pace. None: as soon as it goes. Of a request the deadline stands beside them."""

    ttft_seconds: float | None = None  # from arrival to the first token
    time_per_token_seconds: float | None = None  # the mean over the tokens behind the first
    deadline_seconds: float | None = None  # from arrival to the end, whatever there is by then


NO_TARGETS = Targets()


class TargetOrigin(enum.StrEnum):
    """Who stated a target."""

    REQUEST = "request"
    KEY = "key"
    SERVER = "server"


class TargetOrigins(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who stated each of a request's targets: whoever cannot have one is told where it stands."""

    ttft: TargetOrigin = TargetOrigin.REQUEST
    time_per_token: TargetOrigin = TargetOrigin.REQUEST
    deadline: TargetOrigin = TargetOrigin.REQUEST


OWN_TARGETS = TargetOrigins()


class FinishReason(enum.StrEnum):
    """Why a request ended. Exactly one per request."""

    STOP = "stop"  # an end-of-text token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context's end
    ABORT = "abort"  # the caller went away or asked for it
    ERROR = "error"  # the engine could not go on with this request


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens and when to stop. `validate()` before use.

    Stop strings are text and so belong to whoever detokenises; the engine itself stops on token ids only.
    """

    max_tokens: int | None = None  # None: up to the end of the context
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; 0: the chosen token's; k: and the k best
    prompt_logprobs: int | None = None  # likewise of each prompt token, given those before it

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def fewest_tokens(self, most: int) -> int:
        """Return how many of at most `most` tokens an answer has for certain."""
        may_end_early = not self.ignore_eos or bool(self.stop or self.stop_token_ids)
        return min(most, self.min_tokens) if may_end_early else most

    def plain(self) -> "SamplingParams":
        """Return the same in types of our own: other libraries' numbers and arrays, and one stop string, are taken.

        Raises InvalidParameter for the first value of a wrong type. What was decoded has none.
        """
        values = {name: _plain(getattr(self, name)) for name in self.__struct_fields__}
        if isinstance(self.stop, str):
            values["stop"] = (self.stop,)
        with contextlib.suppress(msgspec.ValidationError):
            return msgspec.convert(values, type(self))
        for field in msgspec.structs.fields(self):
            try:
                msgspec.convert(values[field.name], field.type)
            except msgspec.ValidationError:
                raise InvalidParameter(field.name, getattr(self, field.name), f"give {_KINDS[field.type]}") from None
        raise AssertionError("values that can be had one by one can be had together")

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidParameter for the first value the engine cannot honour."""
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 10.0)
        if self.max_tokens is not None and not 1 <= self.max_tokens <= MAX_COUNT:
            raise InvalidParameter("max_tokens", self.max_tokens, f"give an integer from 1 to {MAX_COUNT}")
        if not 0 <= self.min_tokens <= MAX_COUNT:
            raise InvalidParameter("min_tokens", self.min_tokens, f"give an integer from 0 to {MAX_COUNT}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter("min_tokens", self.min_tokens, f"give at most max_tokens ({self.max_tokens})")
        if not 0 <= self.top_k <= MAX_COUNT:
            raise InvalidParameter("top_k", self.top_k, f"give an integer from 0 (no limit) to {MAX_COUNT}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise InvalidParameter("seed", self.seed, f"give an integer from {-(2**63)} to {2**63 - 1}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidParameter("logprobs", self.logprobs, f"give an integer from 0 to {MAX_LOGPROBS}")
        if self.prompt_logprobs is not None and not 0 <= self.prompt_logprobs <= MAX_LOGPROBS:
            raise InvalidParameter("prompt_logprobs", self.prompt_logprobs, f"give an integer from 0 to {MAX_LOGPROBS}")
        for token_id, bias in self.logit_bias.items():
            _check_token("logit_bias", token_id, vocab_size)
            if not -100.0 <= bias <= 100.0:  # nor NaN
                right = "give a number from -100 to 100 for each token id"
                raise InvalidParameter("logit_bias", {token_id: bias}, right)
        for token_id in self.stop_token_ids:
            _check_token("stop_token_ids", token_id, vocab_size)
        if self.min_tokens and len(self.stop_token_ids) >= vocab_size == len(set(self.stop_token_ids)):
            raise InvalidParameter("min_tokens", self.min_tokens, "give it where some token is not in stop_token_ids")


# What a parameter's type is called to whoever gave another.
_KINDS: dict[object, str] = {
    int: "an integer",
    int | None: "an integer or None",
    float: "a number",
    bool: "True or False",
    dict[int, float]: "a dict from token ids to numbers",
    tuple[str, ...]: "a text or a tuple of texts",
    tuple[int, ...]: "a tuple of token ids",
}


# Of these nothing is to be made; looking them up is far quicker than asking which kind of number they are.
_OWN_TYPES = frozenset({bool, int, float, str, type(None)})


def _plain(value: object) -> object:
    """Return another library's number as Python's own, also within lists, arrays and dicts."""
    if type(value) in _OWN_TYPES:
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range) or getattr(value, "ndim", 0) == 1:
        return tuple(_plain(item) for item in cast("Iterable[object]", value))
    if not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def check_answer_fits(
    num_prompt_tokens: int,
    max_tokens: int | None,
    max_context_tokens: int,
    *,
    min_tokens: int = 0,
    param: str = "max_tokens",
    prompt: str = "prompt",
) -> None:
    """Raise when the answer that was asked for would not fit behind the prompt: it is never cut short silently.

    `param` is what the caller calls `max_tokens`, `prompt` the prompt's name: one of several has its place in it.
    """
    room = max_context_tokens - num_prompt_tokens
    asked, param = (min_tokens, "min_tokens") if max_tokens is None else (max_tokens, param)
    if asked > room and room < 1:
        raise ContextTooLong(num_prompt_tokens, max_context_tokens, what=spoken_prompt(prompt), param=prompt)
    if asked > room:
        what = f"{spoken_prompt(prompt)} ({num_prompt_tokens} tokens) plus {param} ({asked})"
        total = num_prompt_tokens + asked
        raise ContextTooLong(total, max_context_tokens, what=what, param=param, right=f"give at most {room}")


def prompt_names(num_prompts: int) -> list[str]:
    """Return what errors call each of so many prompts."""
    return ["prompt"] if num_prompts == 1 else [f"prompt[{place}]" for place in range(num_prompts)]


def spoken_prompt(param: str) -> str:
    """Return what a sentence calls the prompt of a parameter: by its place, where there are several."""
    return param if param.endswith("]") else "the prompt"


def check_text_tokens(token_ids: list[int], vocab_size: int, *, param: str) -> None:
    """Raise when the tokenizer gave a text a token that the model has no place for."""
    highest = max(token_ids, default=0)
    if highest >= vocab_size:
        raise RequestError(
            f"{param}: the tokenizer has token {highest} for a part of this text, but the model knows 0 to "
            f"{vocab_size - 1} only; leave that part out, most likely a special token",
            param=param,
        )


def _check_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if not math.isfinite(value) or value > high or value < low or (open_low and value == low):
        bounds = f"over {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise InvalidParameter(name, value, f"give a number {bounds}")


def _check_token(name: str, token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise InvalidParameter(name, token_id, f"give token ids from 0 to {vocab_size - 1}")
