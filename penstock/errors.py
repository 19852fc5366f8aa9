"""Every error Penstock raises on purpose.

    PenstockError
    ├── ConfigError          an option is wrong: names the option, the value and what would be right
    ├── ModelError           a model cannot be used: names the file and, where there is one, the tensor
    │   └── ModelNotFound    no such alias, folder, file or hub id
    ├── RequestError         the caller's request is wrong; never the server's fault
    │   ├── InvalidParameter     a parameter's type, range or combination
    │   ├── UnsupportedParameter     a parameter that exists but that this server cannot honour
    │   ├── UnknownModel         the model asked for is not served here
    │   ├── UnusableAlias        the API key allows an alias only, where the model's own name is needed
    │   ├── ContextTooLong       prompt (plus wanted output) exceeds the context
    │   ├── TargetUnreachable    a target or deadline that this engine could not keep even if it were idle
    │   ├── TemplateFailed       the chat template is missing, refused the messages or broke its limits
    │   ├── MalformedBody        the HTTP body is not JSON
    │   ├── BodyTooLarge         the HTTP body exceeds the limit
    │   ├── HeadTooLarge         the HTTP head exceeds the limit
    │   ├── RequestTimeout       the HTTP request did not arrive in time
    │   ├── WrongMediaType       the HTTP body is not declared to be JSON
    │   ├── NotAuthenticated     no API key, or one that is not known
    │   ├── NotPermitted         the API key does not open this route
    │   ├── LimitTooSmall        the request alone is more than its tenant's limit
    │   ├── KeyNotFound          no key of this name
    │   ├── UploadNotFound       no file of this id, or another tenant's
    │   ├── BatchNotFound        no batch of this id, or another tenant's
    │   ├── StorageFull          the tenant has as many files or open batches as it may
    │   ├── RouteNotFound        no such path
    │   └── MethodNotAllowed     the path exists, the method does not
    ├── Overloaded           no place, or none in time; try again after `retry_after_seconds`
    │   └── LimitReached         the tenant has used up a limit for now
    ├── DeadlineExceeded     the caller's deadline passed before the answer was complete
    ├── EngineUnavailable    the engine is starting, restarting or gone
    │   └── NotReady             this server should not be sent work now
    │       └── EngineStalled        nor does it get on with what it has
    ├── StoreUnavailable     the database of keys, limits and usage does not work
    ├── EngineFailed         the engine failed while it worked on this request
    ├── AnswerTooLarge       a replica's answer is more than a gateway reads
    └── RemoteError          a server that we are a client of cannot be reached or refused

`code` is stable and part of the API; texts are not. HTTP statuses belong to `protocol.errors`.
"""

import json
from collections.abc import Mapping
from typing import ClassVar

_SHOWN_CHARACTERS = 80  # of a wrong value, in the sentence that names it


class PenstockError(Exception):
    """Base of all errors that carry a sentence a person can act on."""

    code: ClassVar[str] = "internal_error"


class ConfigError(PenstockError):
    code = "invalid_option"

    def __init__(self, option: str, value: object, right: str) -> None:
        super().__init__(f"{option}: {value!r} is not usable; {right}")
        self.option = option
        self.value = value


class ModelError(PenstockError):
    code = "model_error"

    def __init__(self, message: str, *, file: str | None = None, tensor: str | None = None) -> None:
        where = ", ".join(
            part for part in (f"file {file}" if file else "", f"tensor {tensor}" if tensor else "") if part
        )
        super().__init__(f"{where}: {message}" if where else message)
        self.file = file
        self.tensor = tensor


class ModelNotFound(ModelError):
    code = "model_not_found"


class RequestError(PenstockError):
    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidParameter(RequestError):
    code = "invalid_parameter"

    def __init__(self, param: str, value: object, right: str) -> None:
        super().__init__(f"{param}: {as_json(value)} is not usable; {right}", param=param)


def as_json(value: object) -> str:
    """Show the beginning of a value as the caller wrote it, without writing out all of a large one.

    Half of a surrogate pair, which no response can carry, is shown escaped.
    """
    if isinstance(value, str):
        value = value[: _SHOWN_CHARACTERS + 1]
    text = ""
    try:
        for piece in json.JSONEncoder(ensure_ascii=False, default=repr).iterencode(value):
            text += piece[: _SHOWN_CHARACTERS + 1]
            if len(text) > _SHOWN_CHARACTERS:
                break
    except (TypeError, ValueError):  # Python's own objects may have keys, or hold themselves, as no JSON does
        text = repr(value)
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


class UnsupportedParameter(RequestError):
    code = "unsupported_parameter"

    def __init__(self, param: str, value: object, right: str) -> None:
        super().__init__(f"{param}: {as_json(value)} is not supported; {right}", param=param)


class UnknownModel(RequestError):
    code = "model_not_found"

    def __init__(self, model: str, served: list[str]) -> None:
        others = f"served: {', '.join(served)}" if served else "nor is any other that you may use: ask who runs it"
        super().__init__(f"model {model[:200]!r} is not served here; {others}", param="model")


class UnusableAlias(RequestError):
    code = UnknownModel.code

    def __init__(self, alias: str) -> None:
        super().__init__(
            f"your API key allows {alias[:200]!r} as an alias only, and servers that do not share the gateway's store "
            "know no aliases: ask who runs it to give them its --store, or your key the model's own name",
            param="model",
        )


class ContextTooLong(RequestError):
    code = "context_length_exceeded"

    def __init__(
        self,
        num_tokens: int,
        max_tokens: int,
        *,
        what: str = "the prompt",
        param: str = "messages",
        at_least: bool = False,
        right: str = "at least one token must be left for the answer",
    ) -> None:
        number = f"at least {num_tokens}" if at_least else num_tokens
        super().__init__(
            f"{what} has {number} tokens, but the longest context here is {max_tokens} tokens; {right}", param=param
        )
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


class TargetUnreachable(RequestError):
    code = "target_unreachable"


class TemplateFailed(RequestError):
    code = "chat_template_failed"


class MalformedBody(RequestError):
    code = "invalid_json"


class BodyTooLarge(RequestError):
    code = "body_too_large"

    def __init__(self, max_bytes: int, declared_bytes: int | None = None) -> None:
        size = "" if declared_bytes is None else f" of {declared_bytes} bytes"
        super().__init__(f"the request body{size} is larger than the limit of {max_bytes} bytes; send less at once")


class HeadTooLarge(RequestError):
    code = "head_too_large"

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"the request's headers are larger than the limit of {max_bytes} bytes")


class RequestTimeout(RequestError):
    code = "request_timeout"


class WrongMediaType(RequestError):
    code = "unsupported_media_type"


class NotAuthenticated(RequestError):
    code = "invalid_api_key"


class NotPermitted(RequestError):
    code = "permission_denied"


class LimitTooSmall(RequestError):
    code = "limit_too_small"

    def __init__(self, limit: str, most: int, amount: int, *, param: str | None) -> None:
        super().__init__(
            f"this request may need {amount} of {limit}, but your key has {most} in all; make it smaller", param=param
        )


class KeyNotFound(RequestError):
    code = "key_not_found"


class UploadNotFound(RequestError):
    code = "file_not_found"


class BatchNotFound(RequestError):
    code = "batch_not_found"


class StorageFull(RequestError):
    code = "storage_limit_reached"


class RouteNotFound(RequestError):
    code = "route_not_found"


class MethodNotAllowed(RequestError):
    code = "method_not_allowed"


class Overloaded(PenstockError):
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class LimitReached(Overloaded):
    code = "rate_limit_exceeded"

    def __init__(self, limit: str, most: int, *, retry_after_seconds: float, headers: Mapping[str, str]) -> None:
        message = f"the limit of your key is reached: {limit} = {most}; try again in {retry_after_seconds:.3f} s"
        super().__init__(message, retry_after_seconds=retry_after_seconds)
        self.limit = limit
        self.headers = headers


class DeadlineExceeded(PenstockError):
    code = "deadline_exceeded"


class EngineUnavailable(PenstockError):
    code = "engine_unavailable"


class NotReady(EngineUnavailable):
    code = "not_ready"


class EngineStalled(NotReady):
    code = "engine_stalled"


class StoreUnavailable(PenstockError):
    code = "store_unavailable"


class EngineFailed(PenstockError):
    code = "engine_failed"


class AnswerTooLarge(PenstockError):
    code = "answer_too_large"

    def __init__(self, max_bytes: int) -> None:
        super().__init__(
            f"a replica's answer is larger than the {max_bytes} bytes that are read to know what it cost; "
            "ask for less at once, or for a stream"
        )


class RemoteError(PenstockError):
    code = "remote_error"

    def __init__(self, message: str, *, remote_code: str | None = None) -> None:
        super().__init__(message)
        self.remote_code = remote_code  # which the server gave its refusal, where it did
