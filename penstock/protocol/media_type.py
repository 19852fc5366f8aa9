"""What a request's body must be declared to be. Knows nothing of what is in it."""

from collections.abc import Mapping

from penstock.errors import WrongMediaType


def check_json(headers: Mapping[str, str]) -> None:
    """Raise WrongMediaType unless the body is JSON: a web page may send other types to any server without asking."""
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise WrongMediaType("send the body as JSON, with the header 'Content-Type: application/json'")
    check_encoding(headers)


def check_encoding(headers: Mapping[str, str]) -> None:
    """Raise WrongMediaType for a compressed body: few bytes of it could be any number of ours."""
    for header, plain in (("Content-Encoding", ("", "identity")), ("Transfer-Encoding", ("", "chunked"))):
        encoding = headers.get(header.lower(), "").strip().lower()
        if encoding not in plain:
            raise WrongMediaType(f"send the body as it is, without '{header}: {encoding[:100]}'")
