"""What servers and gateways say of themselves."""

import pytest

from penstock.protocol.identity import Identity, decode_identity, encode_identity


@pytest.mark.parametrize(
    "identity",
    [
        Identity("server"),
        Identity("server", store="5e1f", has_keys=True),
        Identity("gateway", instance="0af3"),
    ],
)
def test_what_is_said_is_understood(identity):
    assert decode_identity(encode_identity(identity)) == identity


@pytest.mark.parametrize("text", ["", "server", "server; store=a b; keys=on", "gateway; instance=", "other; store=a"])
def test_whatever_else_comes_tells_nothing(text):
    assert decode_identity(text) is None
