"""Errors carry a sentence that says what to do, and a stable code."""

import inspect

import pytest

from penstock import errors


def all_errors() -> list[type[errors.PenstockError]]:
    return [item for item in vars(errors).values() if inspect.isclass(item) and issubclass(item, errors.PenstockError)]


def test_codes_are_stable() -> None:
    assert {item.__name__: item.code for item in all_errors()} == {
        "PenstockError": "internal_error",
        "ConfigError": "invalid_option",
        "ModelError": "model_error",
        "ModelNotFound": "model_not_found",
        "RequestError": "invalid_request",
        "InvalidParameter": "invalid_parameter",
        "UnsupportedParameter": "unsupported_parameter",
        "UnknownModel": "model_not_found",
        "UnusableAlias": "model_not_found",
        "ContextTooLong": "context_length_exceeded",
        "TargetUnreachable": "target_unreachable",
        "TemplateFailed": "chat_template_failed",
        "MalformedBody": "invalid_json",
        "BodyTooLarge": "body_too_large",
        "HeadTooLarge": "head_too_large",
        "RequestTimeout": "request_timeout",
        "WrongMediaType": "unsupported_media_type",
        "NotAuthenticated": "invalid_api_key",
        "NotPermitted": "permission_denied",
        "LimitTooSmall": "limit_too_small",
        "KeyNotFound": "key_not_found",
        "UploadNotFound": "file_not_found",
        "BatchNotFound": "batch_not_found",
        "StorageFull": "storage_limit_reached",
        "RouteNotFound": "route_not_found",
        "MethodNotAllowed": "method_not_allowed",
        "Overloaded": "overloaded",
        "LimitReached": "rate_limit_exceeded",
        "DeadlineExceeded": "deadline_exceeded",
        "EngineUnavailable": "engine_unavailable",
        "NotReady": "not_ready",
        "EngineStalled": "engine_stalled",
        "StoreUnavailable": "store_unavailable",
        "EngineFailed": "engine_failed",
        "AnswerTooLarge": "answer_too_large",
        "RemoteError": "remote_error",
    }


def test_the_modules_tree_names_every_error() -> None:
    assert errors.__doc__ is not None
    for item in all_errors():
        assert item.__name__ in errors.__doc__


def test_a_config_error_names_the_option_the_value_and_what_would_be_right() -> None:
    assert str(errors.ConfigError("--port", 70000, "give a number from 0 to 65535")) == (
        "--port: 70000 is not usable; give a number from 0 to 65535"
    )


@pytest.mark.parametrize(
    ("file", "tensor", "text"),
    [
        ("a.gguf", "output.weight", "file a.gguf, tensor output.weight: it is cut off"),
        ("a.gguf", None, "file a.gguf: it is cut off"),
        (None, None, "it is cut off"),
    ],
)
def test_a_model_error_names_the_file_and_the_tensor(file: str | None, tensor: str | None, text: str) -> None:
    assert str(errors.ModelError("it is cut off", file=file, tensor=tensor)) == text


def test_a_long_value_is_cut_in_the_sentence() -> None:
    text = str(errors.InvalidParameter("stop", "x" * 10_000, "give a short string"))
    assert len(text) < 150
    assert text.startswith('stop: "xxx')
    assert text.endswith("... is not usable; give a short string")


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "null"), (True, "true"), ([False, 1.5], "[false, 1.5]"), ("é", '"é"'), ("\ud800", '"\\ud800"'), ((), "[]")],
)
def test_a_callers_value_is_shown_as_json(value: object, shown: str) -> None:
    assert str(errors.InvalidParameter("stop", value, "no")) == f"stop: {shown} is not usable; no"


def test_an_unknown_model_says_what_is_served() -> None:
    error = errors.UnknownModel("gpt-9", ["smollm2-135m", "other"])
    assert "'gpt-9'" in str(error)
    assert "smollm2-135m, other" in str(error)
    assert error.param == "model"


def test_a_context_that_is_too_long_gives_both_numbers() -> None:
    error = errors.ContextTooLong(9000, 8192)
    assert "9000 tokens" in str(error)
    assert "8192 tokens" in str(error)
    assert "at least 9000 tokens" in str(errors.ContextTooLong(9000, 8192, at_least=True))
