"""The catalogue: every error that a caller can meet has a status, a type and a stable code."""

import json
import re
from pathlib import Path

import pytest

from penstock import errors
from penstock.errors import (
    ConfigError,
    EngineUnavailable,
    InvalidParameter,
    ModelError,
    NotAuthenticated,
    NotReady,
    Overloaded,
    PenstockError,
)
from penstock.protocol.errors import CATALOGUE, INTERNAL_MESSAGE, reply_for


def every_subclass(kind):
    for child in kind.__subclasses__():
        yield child
        yield from every_subclass(child)


@pytest.mark.parametrize(
    "kind",
    [errors.RequestError, *every_subclass(errors.RequestError), errors.Overloaded, errors.EngineUnavailable,
     errors.DeadlineExceeded, errors.NotReady, errors.EngineFailed],
)  # fmt: skip
def test_every_error_for_callers_is_in_the_catalogue(kind):
    assert kind.code in CATALOGUE


def test_requests_are_blamed_with_4xx_and_ourselves_with_5xx():
    for kind in every_subclass(errors.RequestError):
        assert 400 <= CATALOGUE[kind.code].status < 500
    for kind in (errors.EngineUnavailable, errors.NotReady, errors.EngineFailed):
        assert CATALOGUE[kind.code].status >= 500


def test_a_body_names_message_type_parameter_and_code():
    reply = reply_for(InvalidParameter("top_p", 3, "give less"))
    assert reply.status == 400
    assert json.loads(reply.body) == {
        "error": {
            "message": "top_p: 3 is not usable; give less",
            "type": "invalid_request_error",
            "param": "top_p",
            "code": "invalid_parameter",
        }
    }


@pytest.mark.parametrize(
    "error", [KeyError("secret"), PenstockError("secret"), ConfigError("secret", 1, "x"), ModelError("secret")]
)
def test_what_is_not_for_callers_says_nothing(error):
    reply = reply_for(error)
    assert reply.status == 500
    assert json.loads(reply.body)["error"]["message"] == INTERNAL_MESSAGE
    assert b"secret" not in reply.body


def test_an_overload_says_when_to_come_back():
    reply = reply_for(Overloaded("full", retry_after_seconds=0.2))
    assert (reply.status, reply.headers) == (429, {"retry-after": "1", "retry-after-ms": "200"})


def test_an_engine_that_is_down_says_when_to_come_back():
    for error in (EngineUnavailable("starting"), NotReady("starting")):
        reply = reply_for(error)
        assert (reply.status, reply.headers) == (503, {"retry-after": "5"})


def test_a_missing_key_says_how_to_send_one():
    assert reply_for(NotAuthenticated("no")).headers == {"www-authenticate": "Bearer"}


def test_the_document_lists_the_catalogue():
    text = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    documented = {
        code: int(status) for code, status in re.findall(r"^\| `(\w+)` \| (\d{3}) \|", text, flags=re.MULTILINE)
    }
    assert documented == {code: kind.status for code, kind in CATALOGUE.items()}
